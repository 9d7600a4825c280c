"""Text and charts of the card from plain values."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, cast

from decorators.card import step as card
from decorators.card.blocks import Block, Log
from decorators.card.state import CardState, Setting
from decorators.card.step import Chart, Grid, Text, comparison, draw, status, title
from estimator.plan import Override
from launchers.report.state import RunState
from launchers.report.telemetry import Evaluated, Phase, Warned
from tests.decorators.flows.plans import make_plan
from tests.decorators.profile.states import STARTED, make_state


def _text(blocks: list[Block]) -> str:
    parts = []
    for block in blocks:
        if isinstance(block, Text):
            parts.append(block.markdown)
        elif isinstance(block, Grid):
            parts += [" | ".join(str(cell) for cell in row) for row in (block.headers, *block.rows)]
    return "\n".join(parts)


def _charts(blocks: list[Block]) -> list[dict[str, Any]]:
    return [block.spec for block in blocks if isinstance(block, Chart)]


def test_predicted_and_measured_values_are_side_by_side() -> None:
    rows = {label: (predicted, measured) for label, predicted, measured in comparison(make_state())}
    assert rows["memory of a GPU, by NVML"] == ("34.0 GiB, at most 40.0 GiB", "32.5 GiB")
    assert rows["host memory of a node"] == ("100 GiB", "61.0 GiB")
    assert rows["tokens/s"] == ("24,000", "16,391")
    assert rows["time"] == ("1:30:00", "4:20 so far")
    assert rows["USD"] == ("61.45", "2.96 so far")


def test_unknown_values_are_shown_as_unknown() -> None:
    rows = {label: values for label, *values in comparison(make_state(on_gpus=False))}
    assert rows["tokens/s"][0] == rows["time"][0] == "unknown"
    assert "USD" not in rows, "neither predicted nor measured"
    assert "MFU" not in rows


def test_the_title_names_model_method_and_machine() -> None:
    assert title(make_state()) == "tiny-llama · full · torchtune · 1 node x 8 A100-80GB"
    two = make_state(plan=make_plan({"nodes": 2}, "kubernetes"))
    assert "2 nodes x 8" in title(two)
    assert "node 0" in title(two)
    second = dataclasses.replace(two, measured=dataclasses.replace(two.measured, node=1))
    assert "node 0 has the main card" in title(second)


def test_the_status_shows_progress_and_outcome() -> None:
    running = status(make_state())
    assert running.startswith("**Running** for 4:20 · step 120 of 400 · loss 1.2")
    assert "ETA 9:" in running
    assert "load" in status(make_state(more=[Phase(rank=7, name="load", at=STARTED - 1)]))
    assert status(make_state(ended=STARTED + 260)).startswith("**Finished** in 4:20")
    failed = status(make_state(ended=STARTED + 260, failed="CUDA out of *memory*\nmore"))
    assert failed.startswith("**Failed** after 4:20")
    assert "CUDA out of \N{ASTERISK OPERATOR}memory\N{ASTERISK OPERATOR}" in failed
    assert "more" not in failed


def test_the_users_own_values_and_the_reasons_are_shown() -> None:
    override = Override(name="cpu", planned="96", used="4", given_by="--with kubernetes:cpu=")
    plan = make_plan({}, "kubernetes").with_override(override, cpu=4)
    text = _text(draw(make_state(plan=plan)))
    assert "cpu | 96 | 4 | --with kubernetes:cpu=" in text
    assert "The cheapest machine that fits." in text
    assert "p5.48xlarge: fits, but 2.4 times the price" in text


def test_warnings_of_the_run_are_shown_once() -> None:
    state = make_state()
    for rank in (0, 1):
        state.run.add(Warned(rank=rank, text="liger off: its kernel failed"))
    assert _text(draw(state)).count("liger off: its kernel failed") == 1


def test_every_rank_has_its_row() -> None:
    rows = card.rank_rows(make_state())
    assert [row[0] for row in rows] == [str(rank) for rank in range(8)]
    assert rows[7] == (
        "7", "node-0", "cuda:7 NVIDIA A100-SXM4-80GB", "train", rows[7][4], "31.9 GiB", "645 MiB"
    )  # fmt: skip
    assert card.rank_rows(make_state(on_gpus=False))[0][5] == "no GPU"


def test_curves_show_the_reported_metrics() -> None:
    def curves(state: CardState) -> list[str]:
        return [view["title"]["text"] for view in card._curves(state)]

    state = make_state()
    always = ["loss", "tokens/s", "seconds of a step"]
    assert curves(state) == ["loss", "learning rate", *always[1:], "MFU", "gradient norm"]
    assert "MFU" not in curves(make_state(on_gpus=False)), "its peak is unknown"
    bare = [dataclasses.replace(each, lr=None, grad_norm=None, mfu=None) for each in state.run.steps]
    run = cast("RunState", SimpleNamespace(steps=bare, evaluations=(), plan=state.plan))
    assert curves(dataclasses.replace(state, run=run)) == always


def test_settings_are_complete_with_changed_ones_first_and_the_log_is_last() -> None:
    settings = (
        Setting(name="optimizer.lr", value="0.003", default="auto"),
        Setting(name="seed", value="0", default="0"),
    )
    blocks = draw(make_state(settings=settings, log_tail="one\ntwo"))
    assert blocks[-1] == Log(text="one\ntwo")
    text = _text(blocks[:-1])
    assert "optimizer.lr | 0.003 | auto" in text
    assert "**Defaults:** seed 0" in text


def test_the_card_of_a_step_without_a_prediction_shows_only_measured_values() -> None:
    state = make_state(steps=0, on_gpus=False)
    evaluated = dataclasses.replace(state, run=RunState(), about=state.plan)
    assert title(evaluated) == "tiny-llama · full · torchtune · train"
    grid = next(block for block in draw(evaluated) if isinstance(block, Grid))
    assert grid.headers == ("", "measured")
    assert "unknown" not in {row[1] for row in grid.rows}


def test_held_out_losses_are_drawn_over_the_training_curve_with_the_lowest_marked() -> None:
    losses = [(40, 1.75), (80, 1.5), (120, float("nan"))]
    evaluations = [
        Evaluated(rank=0, step=step, done=9, rows=9, loss=loss, seconds=2.0) for step, loss in losses
    ]
    exported = (("exported", "step 80 of 120, the lowest held-out loss (1.5000)"),)
    state = make_state(more=evaluations, exported=exported)
    blocks = draw(state)
    (loss,) = [view for view in _charts(blocks) if view.get("title", {}).get("text") == "loss"]
    curve, rule, point = loss["layer"][-3:]
    assert curve["data"]["values"] == [{"step": 40, "value": 1.75}, {"step": 80, "value": 1.5}]
    assert rule["data"]["values"] == point["data"]["values"] == [{"step": 80, "value": 1.5}]
    assert "lowest loss: step 80" in loss["title"]["subtitle"]
    json.dumps(_charts(blocks), allow_nan=False)
    text = _text(blocks)
    assert "lowest held-out loss |  | 1.5000 after step 80, of 3 evaluations" in text
    assert "step 80 of 120" in text
    plain = [chart.get("title") for chart in _charts(draw(make_state()))]
    assert "held out" not in json.dumps(plain)
