"""A pending job: each reason is printed once, the wait has a timeout, the job is removed. Simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decorators._metaflow import WaitedJob
from decorators.backends import pending
from decorators.backends.interface import STARTED, WaitState
from decorators.backends.kubernetes.waiting import PERMANENT_FAILURES
from decorators.backends.pending import Watch
from estimator.errors import UserError

JOB = WaitedJob(backend="kubernetes", kind="job", name="t-1")


class _Bed:
    """A watch on a cluster whose state is a function of time."""

    def __init__(self, states: Callable[[float], WaitState], minutes: float = 30) -> None:
        self.now, self.said, self.ended, self.looks = 0.0, list[str](), list[str](), 0

        def wait_state(job: WaitedJob) -> WaitState:
            self.looks += 1
            return states(self.now)

        self.watch = Watch(
            timeout_s=minutes * 60,
            wait_state=wait_state,
            remove=lambda job: self.ended.append(job.name),
            report=self.said.append,
            clock=lambda: self.now,
        )

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.watch(JOB)
            self.now += 1


def _waits(reason: str, image: str = "") -> WaitState:
    return WaitState(pending=True, reason=reason, permanent_failure=PERMANENT_FAILURES.get(image))


def test_a_reason_is_printed_when_it_changes_and_once_per_minute() -> None:
    bed = _Bed(lambda now: _waits("0/2 nodes: no GPU" if now < 100 else "0/2 nodes: no memory"))
    bed.run(150)
    assert bed.said == [
        "job t-1 is waiting: 0/2 nodes: no GPU",
        "job t-1 is waiting for 60 s: 0/2 nodes: no GPU",
        "job t-1 is waiting: 0/2 nodes: no memory",
    ]


def test_a_reason_that_differs_only_in_numbers_is_not_printed_again() -> None:
    bed = _Bed(lambda now: _waits(f"0/{int(now)} nodes are available"))
    bed.run(59)
    assert len(bed.said) == 1


def _nodes(running: int) -> WaitState:
    missing = tuple(f"t-1-{index}" for index in range(running, 3))
    return WaitState(pending=True, reason="no GPU", running=running, nodes=3, missing=missing)


def test_the_timeout_restarts_when_another_node_starts() -> None:
    bed = _Bed(lambda now: _nodes(0) if now < 100 else _nodes(1) if now < 200 else _nodes(2), minutes=2)
    with pytest.raises(UserError) as caught:
        bed.run(1000)
    assert 320 <= bed.now <= 330
    assert caught.value.problem == (
        "job t-1: 2 of 3 nodes have started, no further node within 2 min (no GPU); the job was removed."
    )
    assert bed.said[-1] == "job t-1 is waiting for 5 min (2 of 3 nodes running; waiting for t-1-2): no GPU"


def test_the_wait_ends_at_its_timeout_with_the_reason_and_the_job_is_removed() -> None:
    bed = _Bed(lambda _: _waits("no H100 left"), minutes=2)
    with pytest.raises(UserError, match=r"not started after 2 min \(no H100 left\); the job was removed"):
        bed.run(200)
    assert 120 <= bed.now <= 130
    assert bed.ended == ["t-1"]
    bed.run(100)  # while this process ends, Metaflow asks on
    assert bed.ended == ["t-1"]


def test_a_started_job_is_no_longer_watched() -> None:
    bed = _Bed(lambda now: _waits("slow") if now < 50 else STARTED, minutes=2)
    bed.run(1000)
    assert bed.ended == []
    assert bed.looks < 20


def test_short_image_pull_errors_are_tolerated_and_lasting_ones_end_the_wait() -> None:
    bed = _Bed(lambda now: _waits("ErrImagePull", "ErrImagePull") if now % 100 < 60 else _waits("pulling"))
    bed.run(1000)
    assert bed.ended == []
    stuck = _Bed(lambda now: _waits("ErrImagePull", "ErrImagePull" if now % 2 else "ImagePullBackOff"))
    with pytest.raises(UserError, match="cannot start: ErrImagePull"):
        stuck.run(1000)
    assert stuck.now <= 130


def test_an_invalid_image_name_ends_the_wait_at_once() -> None:
    bed = _Bed(lambda _: _waits("InvalidImageName", "InvalidImageName"))
    with pytest.raises(UserError, match="InvalidImageName"):
        bed.run(10)
    assert bed.now == 0


def test_the_reason_for_abandoning_a_wait_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watchers: list[Any] = []
    reasons: list[str] = []
    backend = SimpleNamespace(wait_state=lambda _: _waits("no H100 left"), remove=lambda _: None)
    monkeypatch.setattr(pending, "_installed", False)
    monkeypatch.setattr(pending, "BACKENDS", {"kubernetes": backend})
    monkeypatch.setattr(pending.waiting_datastore, "watch", lambda _: None)
    monkeypatch.setattr(pending._metaflow, "watch_waiting", watchers.append)
    monkeypatch.setenv(pending.TIMEOUT_VARIABLE, "0")
    pending.install(reasons.append)
    with pytest.raises(UserError, match="no H100 left"):
        watchers[0](WaitedJob(backend="kubernetes", kind="job", name="t-1"))
    assert len(reasons) == 1
    assert "no H100 left" in reasons[0]


def test_a_timeout_is_in_minutes_and_each_job_is_watched_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watchers: list[Any] = []
    environment_created: list[float] = []

    def watch(*, timeout_s: float, **_: Any) -> Callable[[WaitedJob], None]:
        environment_created.append(timeout_s)
        return lambda _: None

    monkeypatch.setattr(pending, "_installed", False)
    monkeypatch.setattr(pending, "Watch", watch)
    monkeypatch.setattr(pending.waiting_datastore, "watch", lambda _: None)
    monkeypatch.setattr(pending._metaflow, "watch_waiting", watchers.append)
    monkeypatch.setenv(pending.TIMEOUT_VARIABLE, "7")
    pending.install()
    for name in ("t-1", "t-1", "t-2"):
        watchers[0](WaitedJob(backend="kubernetes", kind="job", name=name))
    assert environment_created == [420, 420]
