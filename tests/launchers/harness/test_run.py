"""Base and fine-tuned model are scored by lm-evaluation-harness on a custom task, without a network."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decorators.card.blocks import Grid
from decorators.card.evaluation import task_blocks
from estimator.errors import UserError
from launchers.cluster import processes
from launchers.engines.loop.model import made_trainable
from launchers.harness import run, tasks
from launchers.harness.result import HarnessResult, merged, scores_of
from launchers.models import causal, tiny_llama
from launchers.settings import build
from tests.conftest import write_sums
from tests.launchers.engines.loop import runs
from tests.launchers.harness.files import HAS_HARNESS, NO_HARNESS, SUMS, write_task

ROWS = 6
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason=NO_HARNESS)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Scores of a base that prefers capitals and of an adapter that does not."""
    folder = tmp_path_factory.mktemp("harness")
    base = tiny_llama.make(folder / "base")
    write_sums(folder / "sums.jsonl")
    settings = build(
        {
            "engine": "fsdp2",
            "method": "lora",
            "harness": {"tasks": [str(write_task(folder))], "limit": ROWS, "num_fewshot": 0},
        }
    )
    job = runs.make_job(folder, base, folder, steps=1, settings=settings.model_dump())
    network = made_trainable(causal.load(base, dtype=torch.float32), job)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    network.save_pretrained(folder / "adapter")
    for path in base.glob("tokenizer*"):
        (folder / "adapter" / path.name).write_bytes(path.read_bytes())
    request = run.HarnessRequest(
        settings=settings, work_dir=folder / "work", models={"base": base, "finetuned": folder / "adapter"}
    )
    stored_scores: list[str] = []
    result = run.run_tasks(request, lambda file: stored_scores.append(file.name))
    return SimpleNamespace(request=request, result=result, kept=stored_scores, network=network, base=base)


@pytest.mark.slow
@needs_harness
def test_scores_of_both_models_equal_those_computed_directly(scored: SimpleNamespace) -> None:
    (row,) = scored.result.rows
    assert (row.task, row.metric, row.rows, row.higher_is_better) == ("sums", "acc", ROWS, True)
    before = _share_of_right_answers(causal.load(scored.base, dtype=torch.float32), scored)
    assert (row.before, row.after) == (before, _share_of_right_answers(scored.network, scored))
    assert row.before_stderr is not None
    assert (scored.kept, scored.result.facts()[0][0]) == (["base.json", "finetuned.json"], "sums, acc")
    grid = next(block for block in task_blocks(scored.result) if isinstance(block, Grid))
    assert (grid.rows[0][0], grid.rows[0][-1]) == ("sums", str(ROWS))


def _share_of_right_answers(network: torch.nn.Module, scored: SimpleNamespace) -> float:
    """Return how often the right answer is more likely than the one in capitals, by log-probability."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(scored.base)
    rows = (scored.base.parent / "sums.jsonl").read_text().splitlines()[:ROWS]
    right = 0
    for row in map(json.loads, rows):
        likely = []
        for answer in (row["output"], row["output"].upper()):
            prompt = f"{row['instruction']}\n{row['input']}\n"
            full_ids = tokenizer(prompt + " " + answer)["input_ids"]
            begin = len(tokenizer(prompt.rstrip())["input_ids"])
            ids = torch.tensor([full_ids])
            with torch.no_grad():
                logs = network.eval()(input_ids=ids).logits.log_softmax(-1)[0, :-1]
            likely.append(logs[range(begin - 1, len(full_ids) - 1), full_ids[begin:]].sum().item())
        right += likely[0] > likely[1]
    return right / ROWS


@pytest.mark.slow
@needs_harness
def test_a_model_with_stored_scores_is_not_scored_again(
    scored: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "started", None)
    assert run.run_tasks(scored.request) == scored.result


@pytest.mark.slow
@needs_harness
def test_a_task_whose_rows_lack_its_columns_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sums(tmp_path / "sums.jsonl")
    file = write_task(tmp_path, SUMS.replace("{{input}}", "{{question}}"))
    with pytest.raises(UserError, match="'question' is undefined") as error:
        run.try_tasks(build({"harness": {"tasks": [str(file)]}}), tmp_path / "work")
    assert str(file) in error.value.problem
    assert processes.marked_pids("none") == []


def test_no_harness_task_is_checked_if_none_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "check", None)
    run.try_tasks(build({}), tmp_path)


class Hanging:
    """A process that does not end; each wait for it takes half a minute."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def wait(self, timeout: float) -> int:
        self.clock[0] += 30
        raise subprocess.TimeoutExpired("harness", timeout)


def test_a_harness_run_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(run, "started", lambda *_, **__: contextlib.nullcontext(Hanging(clock)))
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    settings = build({"harness": {"tasks": ["hellaswag"], "timeout_minutes": 2}})
    request = run.HarnessRequest(settings=settings, work_dir=tmp_path, models={"base": tmp_path})
    with pytest.raises(UserError, match="did not end within 2 minutes"):
        run.run_tasks(request)
    assert clock[0] == 150


def test_scores_have_the_metric_of_the_filter_and_its_standard_error() -> None:
    values = {
        "alias": "sums",
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "f1,strict": 1,
        "f1_stderr,strict": "N/A",
    }
    options = {"n-samples": {"sums": {"effective": 9}}, "higher_is_better": {"sums": {"acc": True}}}
    scores = scores_of({"results": {"sums": values}, **options})
    assert [(each.metric, each.value, each.stderr, each.higher_is_better) for each in scores] == [
        ("acc", 0.5, 0.1, True), ("f1,strict", 1.0, None, None),
    ]  # fmt: skip
    assert {each.rows for each in scores} == {9}
    result = HarnessResult(rows=merged(scores, scores), limit=9, num_fewshot=None, chat=False, version="0.4")
    assert result.options == "lm-evaluation-harness 0.4, at most 9 rows of a task; ± standard error"
    assert result.facts()[0] == ("sums, acc", "0.5000 ± 0.1000 before, 0.5000 ± 0.1000 after")
    assert result.text().splitlines()[2].split() == ["sums", "f1,strict", "1.0000", "1.0000", "9"]
