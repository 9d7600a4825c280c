"""Times and results of evaluations, with a model that is a table, without processes."""

from __future__ import annotations

import dataclasses
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launchers.dataset.prepared import IGNORE, Row
from launchers.engines.loop import evaluation
from launchers.engines.loop.evaluation import Evaluator
from launchers.gang.job import TrainJob
from launchers.gang.leaving import Cadence
from launchers.gang.rank import RankEnv
from launchers.report.evaluations import HeldOutLoss
from tests.launchers.engines.loop import runs

STEPS, HELD_OUT = 10, 7
ALONE = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0)


class Table(torch.nn.Module):
    """A model: a table of next-token probabilities."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(runs.VOCAB, runs.VOCAB, generator=generator)
        self.modes: list[bool] = []

    def logits(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.modes.append(self.training or torch.is_grad_enabled())
        return self.rows[input_ids]

    def log_probability(self, row: Row) -> float:
        """Return the log-probability of the counted tokens."""
        tokens, labels = torch.tensor(row.tokens).long(), torch.tensor(row.labels).long()
        chosen = self.rows[tokens[:-1]].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return float(chosen[labels[1:] != IGNORE].sum())


class Reporter:
    """Records finished evaluations."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def phase(self, *_: Any) -> None:
        pass

    def evaluated(self, event: Any) -> None:
        self.found += [event] if event.loss is not None else []


def make_job(folder: Path, settings: dict[str, Any], rows: list[Row], **options: Any) -> TrainJob:
    data = runs.make_data(folder / "data", rows, batch=1, steps=STEPS)
    runs.make_data(data / "heldout", rows, batch=1, steps=len(rows))
    return runs.make_job(folder, folder, data, steps=STEPS, world=1, settings=settings, **options)


def evaluator(job: TrainJob, table: Table, reporter: Reporter, **options: Any) -> Evaluator:
    reported: Any = reporter
    return Evaluator(job, ALONE, reported, table, Cadence(job, ALONE), **options)


def steps(job: TrainJob, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps of this duration in seconds after which an evaluation takes place."""
    now, table, reporter = [1000.0], Table(), Reporter()
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(evaluation, "time", clock)
    evaluates = evaluator(job, table, reporter)
    for step in range(1, STEPS + 1):
        now[0] += seconds
        evaluates.after(step, table)
    assert not any(table.modes), "in evaluation mode and without gradients"
    assert table.training
    return [event.step for event in reporter.found]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every_steps": 4}, [4, 8, 10]),
        ({"every_steps": 5}, [5, 10]),
        ({"every_minutes": 1.0}, [3, 6, 9, 10]),
        ({"every_minutes": 1.01}, [4, 8, 10]),
        ({"every_minutes": 60}, [10]),
    ],
)
def test_an_evaluation_is_due_by_steps_or_minutes_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: list[int]
) -> None:
    job = make_job(tmp_path, {"evaluation": settings}, runs.documents(HELD_OUT))
    assert steps(job, 20.0, monkeypatch) == expected


def test_rank_0_decides_for_all_ranks_whether_an_evaluation_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, {"evaluation": {"every_minutes": 60}}, runs.documents(3))
    for decided in (0, 1):
        other_ranks = SimpleNamespace(
            is_initialized=lambda: True,
            broadcast=lambda tensor, src, decided=decided: tensor.fill_(decided if src == 0 else -1),
        )
        monkeypatch.setattr(evaluation, "dist", other_ranks)
        assert evaluator(job, Table(), Reporter())._is_due(1, Table.device) == bool(decided)


def test_a_job_without_evaluations_writes_checkpoints_at_its_interval_and_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, {"evaluation": {"every_steps": None}}, runs.documents(3), checkpoint_every=4)
    assert steps(job, 20.0, monkeypatch) == []
    evaluates = evaluator(job, Table(), Reporter())
    assert [step for step in range(1, STEPS + 1) if evaluates.is_kept(step)] == [4, 8]
    assert evaluates.is_exported(STEPS)
    assert not evaluates.stops


@pytest.mark.parametrize(
    ("losses", "improved", "stops"),
    [
        ([3.0, 2.0, 1.0], {6: True, 7: False, 8: True}, False),
        ([1.0, 2.0, 3.0], {2: True, 6: False, STEPS: True}, False),
        ([1.0, 2.0, 3.0, 4.0], {8: True}, True),
    ],
)
def test_a_run_stops_after_three_evaluations_without_improvement_and_keeps_the_best_step(
    tmp_path: Path, losses: list[float], improved: dict[int, bool], stops: bool
) -> None:
    settings = {"evaluation": {"every_steps": 2, "patience": 3}}
    evaluations = tuple(
        HeldOutLoss(step=2 * number, loss=loss, seconds=1.0) for number, loss in enumerate(losses, 1)
    )
    job = make_job(tmp_path, settings, runs.documents(3), checkpoint_every=8, evaluations=evaluations)
    evaluates = evaluator(job, Table(), Reporter())
    assert evaluates.stops == stops
    assert {step: evaluates.is_kept(step) for step in improved} == improved
    assert evaluates.is_exported(evaluations[-1].step) == (losses[-1] == min(losses))
    trial = dataclasses.replace(job, keeps_result=False)
    assert not evaluator(trial, Table(), Reporter()).is_exported(evaluations[-1].step)


def test_sample_images_of_the_base_are_drawn_only_before_the_first_step_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, {"evaluation": {"every_steps": 2}}, runs.documents(3))
    for start, expected in ((0, [0]), (4, [])):
        evaluates, drawn = evaluator(dataclasses.replace(job, start_step=start), Table(), Reporter()), []
        monkeypatch.setattr(evaluates, "_draw", lambda step, *_, drawn=drawn: drawn.append(step))
        evaluates.begin(Table())
        assert drawn == expected


def test_the_evaluation_loss_is_the_mean_over_counted_tokens_with_the_averaged_weights(
    tmp_path: Path,
) -> None:
    rows, table, reporter, entered = runs.documents(HELD_OUT), Table(), Reporter(), []
    job = make_job(tmp_path, {"evaluation": {"every_steps": 2}}, rows)

    def averaged() -> Any:
        entered.append(True)
        return nullcontext()

    evaluator(job, table, reporter, averaged=averaged).after(2, table)
    counted = sum(int((row.labels[1:] != IGNORE).sum()) for row in rows)
    expected = -sum(table.log_probability(row) for row in rows) / counted
    assert reporter.found[0].loss == pytest.approx(expected, rel=1e-5)
    assert entered == [True]


def test_rewards_of_judged_answers_are_averaged_separately_over_good_and_bad_answers(tmp_path: Path) -> None:
    rows, table, reporter = runs.judged(5), Table(), Reporter()
    reference = np.linspace(-30.0, -50.0, len(rows)).reshape(-1, 1)
    np.save(tmp_path / "reference.npy", reference)
    settings = {"task": "kto", "preference": {"beta": 0.2}, "evaluation": {"every_steps": 2}}
    job = make_job(tmp_path, settings, rows, held_out_reference=tmp_path / "reference.npy")
    evaluator(job, table, reporter).after(2, table)
    rewards = [
        0.2 * (table.log_probability(row) - float(value))
        for row, value in zip(rows, reference[:, 0], strict=True)
    ]
    good = [reward for row, reward in zip(rows, rewards, strict=True) if row.desirable]
    bad = [reward for row, reward in zip(rows, rewards, strict=True) if not row.desirable]
    assert len(good) != len(bad)
    metrics_of_rewards = reporter.found[0].metrics
    assert metrics_of_rewards["reward_good"] == pytest.approx(np.mean(good), rel=1e-4)
    assert metrics_of_rewards["reward_bad"] == pytest.approx(np.mean(bad), rel=1e-4)
    assert metrics_of_rewards["reward_margin"] == pytest.approx(np.mean(good) - np.mean(bad), rel=1e-4)
