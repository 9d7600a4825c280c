"""Failures of ranks as recognized by the task of their node from files and exit statuses."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.gang import watch
from launchers.gang.control import Timeouts
from launchers.gang.failures import Failure
from launchers.gang.rank import write_error
from launchers.gang.watch import LocalRanks
from launchers.report.telemetry import Phase
from tests.launchers.gang.conftest import make_job

GONE = 2**22 + 1  # above the kernel's largest process id


class Ranks:
    """Two ranks of node 0 in a work folder, and an agent with a simulated status."""

    def __init__(self, folder: Path, **orders: Any) -> None:
        self.folder, self.agent = folder, SimpleNamespace(code=None)
        for name in ("ranks", "errors", "logs"):
            (folder / name).mkdir()
        agent: Any = SimpleNamespace(poll=lambda: self.agent.code)
        job = make_job(folder, processes=2, **orders)
        self.watched = LocalRanks(job, 0, "marker", agent, Timeouts(rendezvous=60.0, leave=30.0))

    def start(self, *pids: int) -> None:
        for rank, pid in enumerate(pids):
            values = {"pid": pid, "at": time.time()}
            (self.folder / "ranks" / f"rank-{rank:05d}.json").write_text(json.dumps(values))

    def finish(self, *ranks: int) -> None:
        for rank in ranks:
            (self.folder / "ranks" / f"rank-{rank:05d}.done").touch()

    def log(self, text: str) -> None:
        (self.folder / "logs" / "agent.log").write_text(text)

    def failures(self) -> list[Failure]:
        return list(self.watched.failures())


@pytest.fixture
def living() -> Any:
    """The id of a running process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A simulated monotonic clock."""
    now = [1000.0]
    names = {name: getattr(time, name) for name in ("time", "strftime", "localtime")}
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0], **names))
    return now


@pytest.mark.parametrize(
    ("code", "kills", "expected"),
    [
        (3, 0, "ended with exit code 3 before the end of training"),
        (-11, 0, "was ended by SIGSEGV (11)"),
        (-9, 0, "was ended by SIGKILL (9): often the kernel's out-of-memory killer, or a manual kill -9"),
        (-9, 1, "was ended by SIGKILL (9): by the kernel's out-of-memory killer"),
        (-99, 0, "was ended by signal 99"),
    ],
)
def test_a_dead_rank_is_reported_once_with_its_exit_status(
    tmp_path: Path, living: int, monkeypatch: pytest.MonkeyPatch, code: int, kills: int, expected: str
) -> None:
    monkeypatch.setattr(watch, "oom_kills", lambda: 0)
    ranks = Ranks(tmp_path)
    ranks.start(living, GONE)
    assert ranks.failures() == [], "the agent may still report the exit status"
    monkeypatch.setattr(watch, "oom_kills", lambda: kills)
    ranks.log(f"failed (exitcode: {code}) local_rank: 1 (pid: {GONE}) of binary")
    [failure] = ranks.failures()
    assert (failure.rank, failure.secondary, failure.out_of_memory) == (1, False, bool(kills))
    assert failure.message.endswith(expected)
    assert ranks.failures() == []


def test_a_dead_rank_without_an_exit_status_is_reported_after_a_delay(
    tmp_path: Path, living: int, clock: list[float]
) -> None:
    ranks = Ranks(tmp_path)
    ranks.start(living, GONE)
    for wait_s in (0.0, watch._EXIT_CODE_WAIT_S):
        clock[0] += wait_s
        assert ranks.failures() == []
    clock[0] += 0.1
    [failure] = ranks.failures()
    assert "rank 1" in failure.message
    assert failure.message.endswith("ended without an exit code")


def test_ranks_ended_by_torchrun_after_the_first_failure_are_consequences(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.start(GONE, GONE + 1)
    ranks.log(f"exitcode  : -15 (pid: {GONE})\nexitcode  : -9 (pid: {GONE + 1})")
    assert {failure.rank: failure.secondary for failure in ranks.failures()} == {0: True, 1: False}


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (-9, "", "the agent of node 0 on"),
        (0, "", "ended before its ranks had trained to the end"),
        (1, "boom", "ended with exit code 1"),
        (1, "(exitcode: 7) local_rank: 1 (pid: 5)", "rank 1 on"),
    ],
)
def test_an_agent_that_ended_too_early_is_a_failure(
    tmp_path: Path, code: int, log: str, expected: str
) -> None:
    ranks = Ranks(tmp_path)
    ranks.log(log)
    ranks.agent.code = code
    [failure] = ranks.failures()
    assert expected in failure.message
    assert (failure.kind == "agent") == ("local_rank" not in log)


def test_an_error_raised_by_a_rank_is_reported_with_its_kind(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    write_error(tmp_path / "errors", 0, UserError("Line 7 is broken.", "Repair it."))
    write_error(tmp_path / "errors", 1, RuntimeError("Connection closed by peer"))
    first, second = ranks.failures()
    assert (first.kind, str(first.error())) == ("user", "Line 7 is broken.\nRepair it.")
    assert (second.kind, second.secondary) == ("rank", True)


def test_a_silent_rank_counts_as_hanging_after_the_time_limit_of_its_phase(
    tmp_path: Path, living: int, clock: list[float]
) -> None:
    ranks = Ranks(tmp_path, hang_timeout_s=10)
    ranks.start(living, living)
    ranks.watched.add(Phase(rank=0, name="train", step=2))
    ranks.watched.add(Phase(rank=1, name="load", step=0))
    clock[0] += 10.0
    assert ranks.failures() == []
    clock[0] += 0.1
    assert [(failure.kind, failure.rank) for failure in ranks.failures()] == [("hang", 0)]
    assert ranks.failures() == []
    clock[0] += 29.9
    ranks.watched.add(Phase(rank=0, name="train", step=3))
    assert ranks.failures() == [], "a model may be loaded four times as long"
    clock[0] += 0.1
    [failure] = ranks.failures()
    assert failure.message.endswith("its last sign: phase 'load', step 0")


def test_a_rank_that_does_not_start_within_the_time_limit_is_reported(
    tmp_path: Path, living: int, clock: list[float]
) -> None:
    ranks = Ranks(tmp_path)
    ranks.start(living)
    clock[0] += 60.0
    assert ranks.failures() == []
    clock[0] += 0.1
    [failure] = ranks.failures()
    assert failure.rank == 1
    assert failure.message.endswith("did not start within 60 s")


def test_ranks_are_finished_after_training_when_their_processes_have_ended(
    tmp_path: Path, living: int, clock: list[float]
) -> None:
    ranks = Ranks(tmp_path)
    ranks.start(living, GONE)
    ranks.finish(0)
    assert not ranks.watched.finished()
    ranks.finish(1)
    assert not ranks.watched.finished(), "a process still runs"
    clock[0] += 30.0
    assert not ranks.watched.finished()
    clock[0] += 0.1
    assert ranks.watched.finished()
