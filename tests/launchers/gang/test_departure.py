"""A node that must leave ends at once, or after a checkpoint could be stored."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers.cluster.processes import WaitingSignals
from launchers.gang import departure
from launchers.gang.control import Timeouts
from launchers.gang.departure import ENDING_S, Grace
from launchers.gang.hub import Hub
from launchers.gang.leaving import folder_of, read_number
from launchers.gang.rank import write_atomically
from launchers.gang.uploads import Uploads
from tests.launchers.gang.conftest import make_job
from tests.launchers.gang.test_leaving import ALONE

MINUTE = Grace(seconds=60.0, signals=(signal.SIGTERM,))


@pytest.mark.parametrize(
    ("grace", "possible", "times", "seconds", "acts"),
    [
        pytest.param(MINUTE, True, 1, 50.0, 0, id="it waits for a checkpoint"),
        pytest.param(MINUTE, True, 1, 50.1, 1, id="its grace is over"),
        pytest.param(MINUTE, True, 2, 0.0, 1, id="a second signal"),
        pytest.param(MINUTE, False, 1, 0.0, 1, id="there is nothing to store"),
        pytest.param(Grace(seconds=60.0), True, 1, 0.0, 1, id="another signal"),
    ],
)
def test_a_signal_is_deferred_while_a_checkpoint_can_be_stored_within_the_grace_period(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    grace: Grace,
    possible: bool,
    times: int,
    seconds: float,
    acts: int,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(departure, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    hub, job, acted = Hub(ALONE, Timeouts()), make_job(tmp_path), list[int]()
    signals = WaitingSignals({signal.SIGTERM: lambda number, _: acted.append(number)})
    leaving = departure.Departure(job, 0, range(1), hub, Uploads(job, 0, None, hub), grace)
    leaving.possible = possible
    for _ in range(times):
        signals.numbers.append(signal.SIGTERM)
        leaving.poll(signals)
    now[0] += seconds
    leaving.poll(signals)
    hub.close()
    assert len(acted) == acts


def test_the_final_step_is_that_of_the_farthest_rank_once_all_ranks_have_stopped(tmp_path: Path) -> None:
    hub, job = Hub(ALONE, Timeouts(settle=600.0)), make_job(tmp_path, processes=2)
    leaving = departure.Departure(job, 0, range(2), hub, Uploads(job, 0, None, hub), MINUTE)
    leaving.possible = True
    signals = WaitingSignals({})
    signals.numbers.append(signal.SIGTERM)
    folder, decided = folder_of(job.work_dir), []
    for rank, step in ((0, 7), (1, 8)):
        leaving.poll(signals)
        assert (folder / "asked").exists()
        write_atomically(folder / f"rank-{rank:05d}.json", str(step))
        leaving.poll(signals)
        decided.append(read_number(folder / "step"))
    hub.close()
    assert decided == [None, 8]


@pytest.mark.parametrize(("seconds", "storing_s"), [(10 * ENDING_S, 9 * ENDING_S), (ENDING_S, ENDING_S / 2)])
def test_at_most_half_of_a_grace_period_is_reserved_for_ending_the_processes(
    seconds: float, storing_s: float
) -> None:
    assert Grace(seconds=seconds).storing_s == storing_s


@pytest.mark.parametrize(
    ("every", "keeps_result", "exports_only", "evaluates"),
    [(2, True, False, True), (2, False, False, False), (2, True, True, False), (None, True, False, False)],
)
def test_held_out_rows_are_evaluated_only_if_the_trained_model_is_kept(
    tmp_path: Path, every: int | None, keeps_result: bool, exports_only: bool, evaluates: bool
) -> None:
    job = dataclasses.replace(make_job(tmp_path), keeps_result=keeps_result, exports_only=exports_only)
    evaluation = job.settings.evaluation.model_copy(update={"every_steps": every})
    job = dataclasses.replace(job, settings=job.settings.model_copy(update={"evaluation": evaluation}))
    assert job.evaluates == evaluates
