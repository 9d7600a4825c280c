"""Calibration records from the artifacts of earlier runs."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decorators.profile import finished_runs
from estimator.calibration import VARIABLE, Store
from estimator.errors import UserError
from tests.decorators.conftest import Home
from tests.decorators.profile.test_calibration import pair, record


class OfAnotherVersion:
    """An artifact whose class no longer exists."""

    def __init__(self, name: str) -> None:
        self.id = name

    @property
    def data(self) -> Any:
        return pickle.loads(b"cdecorators.measured\nNoSuchClass\n.")  # noqa: S301


def test_a_run_of_an_incompatible_version_is_ignored() -> None:
    class Task(dict[str, OfAnotherVersion]):
        def __iter__(self) -> Iterator[Any]:
            return iter(self.values())

    task = Task({name: OfAnotherVersion(name) for name in ("plan", "measured")})
    assert finished_runs._of_task(task) is None


def test_runs_that_are_not_stored_yet_are_added_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "runs.jsonl"))
    newest_first = [dataclasses.replace(record(*pair()), run=f"F/{number}/train/2") for number in (3, 2, 1)]
    for new in (newest_first[1:], newest_first):
        monkeypatch.setattr(finished_runs, "collect", lambda _, new=new: new)
        status = finished_runs.main(["F"])
    assert status.startswith("1 new run of F in ")
    assert [each.run for each in Store().read().finished] == [f"F/{number}/train/2" for number in (1, 2, 3)]


@pytest.mark.slow
def test_earlier_runs_are_read_from_their_artifacts_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    done = home.run("profiled.py", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    records = Store(home.path / "calibration.jsonl")
    (local,) = records.read().finished
    records.path.unlink()
    for expected_line in ("1 new run", "0 new run"):
        read = home.python("-m", "decorators.profile.finished_runs", "ProfiledFlow")
        assert read.returncode == 0, read.stderr
        assert expected_line in read.stdout
    (collected,) = records.read().finished
    assert dataclasses.replace(collected, date=local.date) == local


def test_a_flow_that_has_never_run_is_named_in_one_line_without_a_user_name(home: Home) -> None:
    read = home.python("-m", "decorators.profile.finished_runs", "NoSuchFlow", METAFLOW_USER="")
    assert read.returncode == 2
    assert read.stderr.startswith("Metaflow finds no flow NoSuchFlow")
    assert "Traceback" not in read.stderr


def test_wrong_arguments_show_the_usage() -> None:
    with pytest.raises(UserError, match=r"python -m decorators\.profile\.finished_runs FLOW"):
        finished_runs.main([])
