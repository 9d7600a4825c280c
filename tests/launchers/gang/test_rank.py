"""Step reports of a rank, and when it stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report.telemetry import Follower, Step


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_nan_loss_is_reported_and_then_ends_the_run(tmp_path: Path, loss: float) -> None:
    reporter = RankReporter(tmp_path, RankEnv.read())

    def report(step: int, loss: float | None) -> None:
        reporter.step(
            step=step, loss=loss, lr=1.0, grad_norm=None, samples=1, tokens=8, dt=1.0, dtf=None, dtb=None
        )

    report(1, 2.5)
    report(2, None)  # another rank's
    with pytest.raises(UserError, match="The loss of step 3 is") as stopped:
        report(3, loss)
    assert "optimizer.lr" in stopped.value.advice
    assert [event.step for event in Follower(tmp_path).poll() if isinstance(event, Step)] == [1, 2, 3]
