"""Lines that several processes add to one file, through the store of finished runs."""

from __future__ import annotations

import fcntl
import multiprocessing
import random
from pathlib import Path

import pytest

from estimator import json_lines
from estimator.calibration import Store
from tests.estimator.calibration.finished_runs import finished


def test_a_truncated_line_does_not_corrupt_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.jsonl")
    store.path.write_text(finished("a").to_json()[:40])
    store.add(finished("b"))
    assert [run.run for run in store.read().finished] == ["b"]


def _add_many(path: str, name: str) -> None:
    for number in range(20):
        Store(path).add(finished(f"{name}/{number}", setup="x" * random.randrange(10_000)))


def test_concurrent_writers_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_many, args=(str(path), str(n))) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    records = Store(path).read()
    assert records.problems == ()
    assert len(records.finished) == 60


def test_a_locked_store_can_be_read_but_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "LOCK_SECONDS", 0.05)
    store = Store(tmp_path / "runs.jsonl")
    store.add(finished("a"))
    with store.path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert [run.run for run in store.read().finished] == ["a"]
        with pytest.raises(TimeoutError, match="another process"):
            store.add(finished("b"))
    store.add(finished("b"))
    assert [run.run for run in store.read().finished] == ["a", "b"]
