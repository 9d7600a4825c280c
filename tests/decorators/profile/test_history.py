"""Telemetry of ranks, put together."""

from __future__ import annotations

import pytest

from decorators.profile.history import History
from launchers.report.metrics import Meter, summarise
from launchers.report.telemetry import Evaluated, Phase, Step
from tests.decorators.flows.plans import make_plan
from tests.decorators.flows.synthetic import events


def _history(**kinds: object) -> History:
    history = History(plan=make_plan({}, "kubernetes"), total_steps=100)
    for event in events(steps=10, ranks=8, on_gpus=True, **kinds):  # type: ignore[arg-type]
        history.add(event)
    return history


def test_ranks_of_other_nodes_count_as_this_nodes() -> None:
    one = History(plan=make_plan({"nodes": 2}, "kubernetes"))
    for event in events(steps=2, ranks=8, on_gpus=True):
        if isinstance(event, Step):
            one.add(event)
    row = one.steps()[-1]
    assert row.tokens_per_second == pytest.approx(16 * 4096 / row.dt)


@pytest.mark.parametrize("node", [0, 1])
def test_the_card_of_either_node_says_what_terminal_and_trackers_say(node: int) -> None:
    plan = make_plan({"nodes": 2}, "local")  # two processes, whose rows are of unequal length
    steps = [_step(rank, tokens) for rank, tokens in ((0, 100), (1, 300))]
    shown = Meter(plan, [400]).add(steps[0])
    history = History(plan=plan, tokens_of_steps=[400])
    history.add(steps[node])
    assert shown.tokens_per_second == 400
    assert history.steps()[0].tokens_per_second == history.tokens_per_second() == 400
    assert summarise([shown]).tokens_per_second == 400


def _step(rank: int, tokens: int) -> Step:
    return Step(
        rank=rank,
        step=1,
        loss=4.0 if rank == 0 else None,
        lr=1e-3,
        grad_norm=1.0,
        samples=4,
        tokens=tokens,
        dt=1.0,
        dtf=None,
        dtb=None,
    )


def test_a_run_without_events_knows_nothing() -> None:
    history = History(plan=None)
    assert history.steps() == history.ranks() == []
    assert history.tokens_per_second() is history.mfu() is history.eta_seconds() is None


def test_the_phase_is_that_of_the_slowest_rank() -> None:
    history = History(plan=None)
    history.add(Phase(rank=0, name="train", at=2.0))
    history.add(Phase(rank=1, name="load", at=1.0))
    assert history.phase.name == "load"


def test_evaluations_are_known_once_and_their_time_is_left_too() -> None:
    history = _history()
    before = history.eta_seconds()
    trained = sum(row.dt for row in history.steps())
    for rank in range(8):
        history.add(Evaluated(rank=rank, step=10, done=4, rows=9, seconds=1.0))  # under way
        history.add(Evaluated(rank=rank, step=10, done=9, rows=9, seconds=trained, loss=1.5))
    assert [(each.step, each.loss) for each in history.evaluations] == [(10, 1.5)]
    assert history.eta_seconds() == pytest.approx(2 * before, rel=0.2)  # dt here is rank 0's
    assert len(history.ranks()) == 8
