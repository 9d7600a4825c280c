"""What a node does with a signal that it has to go: now, or once a checkpoint could be stored."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from launchers.cluster.processes import WaitingSignals
from launchers.gang.control import Timeouts
from launchers.gang.departure import ENDING_S, Departure, Grace
from launchers.gang.hub import Hub
from launchers.gang.uploads import Uploads
from tests.launchers.gang.conftest import make_job
from tests.launchers.gang.test_leaving import ALONE


@pytest.mark.parametrize(
    ("grace", "possible", "times", "acts"),
    [
        pytest.param(
            Grace(seconds=60.0, signals=(signal.SIGTERM,)), True, 1, 0, id="it waits for a checkpoint"
        ),
        pytest.param(Grace(seconds=0.0, signals=(signal.SIGTERM,)), True, 1, 1, id="its grace is over"),
        pytest.param(Grace(seconds=60.0, signals=(signal.SIGTERM,)), True, 2, 1, id="it is told twice"),
        pytest.param(
            Grace(seconds=60.0, signals=(signal.SIGTERM,)), False, 1, 1, id="there is nothing to keep"
        ),
        pytest.param(Grace(seconds=60.0), True, 1, 1, id="of another signal"),
    ],
)
def test_a_signal_waits_while_a_checkpoint_may_be_stored(
    tmp_path: Path, grace: Grace, possible: bool, times: int, acts: int
) -> None:
    hub, job, acted = Hub(ALONE, Timeouts()), make_job(tmp_path), list[int]()
    signals = WaitingSignals({signal.SIGTERM: lambda number, _: acted.append(number)})
    departure = Departure(job, 0, range(1), hub, Uploads(job, 0, None, hub), grace)
    departure.possible = possible
    for _ in range(times):
        signals.numbers.append(signal.SIGTERM)
        departure.poll(signals)
    hub.close()
    assert len(acted) == acts


@pytest.mark.parametrize(("seconds", "storing_s"), [(10 * ENDING_S, 9 * ENDING_S), (ENDING_S, ENDING_S / 2)])
def test_the_end_of_a_grace_is_kept_for_the_processes_but_never_more_than_half(
    seconds: float, storing_s: float
) -> None:
    assert Grace(seconds=seconds).storing_s == storing_s


@pytest.mark.parametrize(
    ("every", "keeps_result", "exports_only", "evaluates"),
    [(2, True, False, True), (2, False, False, False), (2, True, True, False), (None, True, False, False)],
)
def test_held_out_rows_are_measured_only_while_a_model_that_is_kept_is_trained(
    tmp_path: Path, every: int | None, keeps_result: bool, exports_only: bool, evaluates: bool
) -> None:
    job = dataclasses.replace(make_job(tmp_path), keeps_result=keeps_result, exports_only=exports_only)
    evaluation = job.settings.evaluation.model_copy(update={"every_steps": every})
    job = dataclasses.replace(job, settings=job.settings.model_copy(update={"evaluation": evaluation}))
    assert job.evaluates == evaluates
