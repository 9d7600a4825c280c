"""Scripts of the user, run in all processes of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from decorators import own_script
from decorators.own_script import _importable
from estimator.errors import UserError
from launchers.store.bundles import LocalStorage
from tests.decorators.conftest import FLOWS, Home

SCRIPTED = str(FLOWS / "scripted.py")  # nodes are started by the flow's file: no warm Python


def test_only_functions_that_other_processes_can_import_are_accepted() -> None:
    file, name = _importable(test_only_functions_that_other_processes_can_import_are_accepted)
    assert (file, name) == (
        Path(__file__).resolve(),
        "test_only_functions_that_other_processes_can_import_are_accepted",
    )
    for function in (lambda: None, len):
        with pytest.raises(UserError, match="cannot be run by other processes"):
            _importable(function)


def test_nodes_share_ports_and_a_secret_that_is_deleted_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStorage(tmp_path)
    monkeypatch.setattr(own_script, "datastore", lambda: store)
    with own_script._rendezvous("r", 0, 2, 60.0) as (ports, secret):
        assert ports
        with own_script._rendezvous("r", 1, 2, 60.0) as received:
            assert (received[0], received[1].text) == (ports, secret.text)
    assert store.size("r") is None
    with pytest.raises(UserError), own_script._rendezvous("r", 1, 2, 0.05):
        pass
    with own_script._rendezvous("r", 0, 1, 60.0) as alone:
        assert (alone[0], store.size("r")) == ((), None)


@pytest.mark.slow
def test_a_function_or_script_runs_in_every_process_and_reports_to_its_step(home: Home) -> None:
    done = home.python(SCRIPTED, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "spamspam" in done.stdout
    assert "2 ranks made 12" in done.stdout
    gathered = home.artifacts("ScriptedFlow", "gather", "steps", "ranks")
    assert gathered == {"steps": [3, 3], "ranks": [[0], [1]]}
    assert not list((home.path / ".metaflow").rglob("rendezvous*"))


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_nodes_and_is_named(home: Home) -> None:
    done = home.python(SCRIPTED, "run", "--fails", "last")
    assert done.returncode == 1
    assert "the last rank is broken" in done.stdout + done.stderr
    assert "rank 1" in done.stdout + done.stderr
    assert not list((home.path / ".metaflow").rglob("rendezvous*")), "the secret does not outlast the nodes"


@pytest.mark.slow
def test_a_retry_resumes_from_the_checkpoints_of_the_previous_attempt(home: Home) -> None:
    done = home.run("checkpointed.py", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [
        line.rpartition("begins at step ")[2] for line in done.stdout.splitlines() if "begins" in line
    ] == (["1", "3"])
    assert home.artifacts("CheckpointedFlow", "start", "names")["names"] == ["1", "2", "3"]
