"""Log files of launches and tasks in a local store."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.commands import run_logs
from launchers.store.bundles import LocalStorage

_log = logging.getLogger("launchers.run.preparation")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the store, in a task of run 7."""
    folder = tmp_path / "store"
    monkeypatch.setattr(run_logs, "datastore", lambda: LocalStorage(folder))
    monkeypatch.setattr(run_logs, "run_id", lambda: "7")
    monkeypatch.setattr(run_logs, "current", SimpleNamespace(step_name="train", task_id="3", retry_count=1))
    return folder


def test_each_attempt_of_a_task_stores_a_log_even_if_it_fails(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), run_logs.recorded_task(tmp_path):  # noqa: PT012
        _log.debug("engine chosen")
        raise ValueError("broken")
    text = (store / "logs" / "7" / "train" / "3-1.log").read_text()
    assert "engine chosen" in text
    assert "ValueError: broken" in text


def test_only_a_launch_stores_a_log_and_other_commands_of_a_flow_do_not(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["flow.py", "show"])
    with run_logs.recorded_launch():
        _log.debug("shown")
    assert not store.exists()
    monkeypatch.setattr(sys, "argv", ["flow.py", "--quiet", "run"])
    with monkeypatch.context() as patched:
        patched.setattr(run_logs, "run_id", lambda: "None")  # it was refused before it had an id
        with run_logs.recorded_launch():
            _log.debug("refused")
    assert not store.exists()
    with pytest.raises(SystemExit), run_logs.recorded_launch():  # noqa: PT012
        _log.debug("planned")
        raise SystemExit(1)
    assert "planned" in (store / "logs" / "7" / "launch.log").read_text()


def test_a_store_that_refuses_a_log_does_not_change_the_exit_of_the_task(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(LocalStorage):
        def put_file(self, key: str, path: Path) -> None:
            raise OSError(f"{key}: no space left for {path}")

    monkeypatch.setattr(run_logs, "datastore", lambda: Full(store))
    with run_logs.recorded_task(tmp_path):
        _log.debug("trained")
