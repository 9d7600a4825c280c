"""Earlier runs are read within a time limit, and unfinished ones are ignored."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from metaflow import get_namespace, namespace
from metaflow.exception import MetaflowNotFound

from decorators import past_runs
from decorators.past_runs import Attempt, attempts_of, ended_tasks, read_for
from estimator.errors import UserError


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERNAME", "tester")


class Task:
    """The attributes of a task of the Metaflow client that are used."""

    def __init__(self, *artifacts: str, finished: bool = True) -> None:
        self.finished = finished
        self._artifacts = artifacts

    def __iter__(self) -> Any:
        return iter([SimpleNamespace(id=name) for name in self._artifacts])


def test_only_finished_tasks_with_all_artifacts_count() -> None:
    complete_task = Task("cluster", "result", "more")
    runs: list[dict[str, Any]] = [
        {"verdict": SimpleNamespace(task=complete_task)},
        {},  # it ended before its verdict
        {"verdict": SimpleNamespace(task=None)},
        {"verdict": SimpleNamespace(task=Task("cluster", "result", finished=False))},
        {"verdict": SimpleNamespace(task=Task("cluster"))},
    ]
    assert list(ended_tasks(runs, "verdict", ("cluster", "result"))) == [complete_task]


def test_runs_of_all_users_are_read_and_the_namespace_is_restored() -> None:
    before = get_namespace()
    namespaces_seen = []
    namespace("user:somebody")
    try:
        assert read_for(30, lambda over: namespaces_seen.append((get_namespace(), over.is_set())))
        assert namespaces_seen == [(None, False)]
        assert get_namespace() == "user:somebody"
    finally:
        namespace(before)


def test_a_hanging_reader_is_abandoned_at_its_time_limit_and_notified() -> None:
    reported = threading.Event()

    def hang(over: threading.Event) -> None:
        over.wait(60)
        reported.set()

    assert not read_for(0.2, hang)
    assert reported.wait(30)


def noted(*entries: tuple[str, str, int]) -> Any:
    """A task with these metadata of its attempts: (name, value, milliseconds)."""
    items = [SimpleNamespace(name=name, value=value, created_at=at) for name, value, at in entries]
    return SimpleNamespace(metadata=items)


def test_each_attempt_counts_and_a_killed_attempt_lasts_until_the_next_begins() -> None:
    failed = (("attempt", "0", 1000), ("attempt_ok", "False", 31_000))
    killed = (("attempt", "1", 60_000),)
    last = (("attempt", "2", 100_000), ("attempt_ok", "True", 190_000), ("attempt-done", "2", 190_500))
    assert attempts_of(noted(*last, *killed, *failed)) == [
        Attempt(seconds=30.0, succeeded=False),
        Attempt(seconds=40.0, succeeded=False),
        Attempt(seconds=90.0, succeeded=True),
    ]
    assert attempts_of(noted(*killed)) == [Attempt(seconds=None, succeeded=False)]
    assert attempts_of(noted()) == []
    assert attempts_of(noted(*failed, ("origin-task-id", "3", 5))) == []  # a resumed run took it over


def test_a_run_is_found_by_its_last_digits_only_if_no_other_run_ends_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(path: str) -> Any:
        raise MetaflowNotFound(path)

    runs = {"A": [SimpleNamespace(id="17957000001234")], "B": [SimpleNamespace(id="17957000005234")]}
    monkeypatch.setattr(past_runs, "Run", missing)
    monkeypatch.setattr(past_runs, "runs_of", lambda flow, limit: iter(runs[flow][:limit]))
    assert past_runs.find_run(["A", "B"], "1234") is runs["A"][0]
    assert past_runs.find_run(["B"], "234") is runs["B"][0]
    for digits, message in (("234", "2 runs of A or B"), ("99", "There is no run 99 of A or B")):
        with pytest.raises(UserError, match=message):
            past_runs.find_run(["A", "B"], digits)
