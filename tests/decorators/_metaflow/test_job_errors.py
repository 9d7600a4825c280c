"""The last message of a process that waited for a failed step is the step's cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from metaflow.datastore.exceptions import DataException
from metaflow.datastore.flow_datastore import FlowDataStore
from metaflow.exception import MetaflowException

from decorators._metaflow import job_errors

kubernetes = pytest.importorskip("metaflow.plugins.kubernetes.kubernetes")
kubernetes_cli = pytest.importorskip("metaflow.plugins.kubernetes.kubernetes_cli")


class Killed(MetaflowException):
    headline = "Kubernetes error"


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``waiting(error)``: wait for a step as Metaflow's command does; ``error`` ends the wait."""

    def missing(*_: Any, **__: Any) -> None:
        raise DataException("No completed attempts of the task was found for task 'F/1/train/3'")

    def wait(self: Any) -> None:
        if self.error is not None:
            raise self.error

    monkeypatch.setattr(FlowDataStore, "get_task_datastore", missing)
    monkeypatch.setattr(kubernetes_cli, "sync_local_metadata_from_datastore", lambda *_: None)
    monkeypatch.setattr(kubernetes.Kubernetes, "launch_job", lambda *_: None)
    monkeypatch.setattr(kubernetes.Kubernetes, "wait", wait)
    monkeypatch.setattr(job_errors, "command_arguments", lambda: ["kubernetes"])
    monkeypatch.setattr(job_errors.atexit, "register", lambda _: None)
    job_errors.explain_kubernetes_errors(lambda *_: pytest.fail("not explained here"), lambda _: [])

    def command(error: Exception | None) -> None:
        waits = object.__new__(kubernetes.Kubernetes)
        waits.error, waits._job = error, SimpleNamespace(_name="t-1", _namespace="ml", _job=None)
        try:
            waits.wait()
        finally:
            datastore = object.__new__(FlowDataStore)
            kubernetes_cli.sync_local_metadata_from_datastore("folder", datastore.get_task_datastore("1"))

    return command


def test_missing_records_of_a_failed_step_do_not_replace_its_cause(waiting: Any) -> None:
    with pytest.raises(Killed, match="no node within 45 minutes"):
        waiting(Killed("no node within 45 minutes"))
    with pytest.raises(SystemExit):
        waiting(SystemExit(202))


def test_missing_records_of_a_finished_step_are_an_error(waiting: Any) -> None:
    with pytest.raises(DataException):
        waiting(None)


def test_a_deleted_job_is_named_as_deleted(waiting: Any) -> None:
    with pytest.raises(Killed) as caught:
        waiting(Killed("Unable to locate Kubernetes batch/v1 job t-1"))
    assert str(caught.value.message) == "The job t-1 in namespace ml was deleted."
