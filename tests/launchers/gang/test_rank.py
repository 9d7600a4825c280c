"""Step reports of a rank, and when it stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report.telemetry import Follower, Memory, Step


def step_event(step: int, loss: float | None) -> Step:
    return Step(
        rank=0,
        step=step,
        loss=loss,
        lr=1.0,
        grad_norm=None,
        samples=1,
        tokens=8,
        dt=0.001,
        dtf=None,
        dtb=None,
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_nan_loss_is_reported_and_then_ends_the_run(tmp_path: Path, loss: float) -> None:
    reporter = RankReporter(tmp_path, RankEnv.read())

    reporter.step(step_event(1, 2.5))
    reporter.step(step_event(2, None))  # another rank's
    with pytest.raises(UserError, match="The loss of step 3 is") as stopped:
        reporter.step(step_event(3, loss))
    assert "optimizer.lr" in stopped.value.advice
    assert [event.step for event in Follower(tmp_path).poll() if isinstance(event, Step)] == [1, 2, 3]


def test_short_steps_share_a_memory_report_and_the_end_of_training_has_its_own(tmp_path: Path) -> None:
    reporter = RankReporter(tmp_path, RankEnv.read())
    reporter.phase("train")
    for step in range(1, 101):
        reporter.step(step_event(step, None))
    reporter.phase("save", 100)
    events = list(Follower(tmp_path).poll())
    memory = [event.step for event in events if isinstance(event, Memory)]
    assert memory[0] == 1
    assert memory[-1] == 100
    assert len(memory) < 50
    assert len([event for event in events if isinstance(event, Step)]) == 100
