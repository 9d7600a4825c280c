"""Errors of a backend in the process that waits for a job; the last message is the cause of the failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from metaflow.datastore.exceptions import DataException
from metaflow.datastore.flow_datastore import FlowDataStore
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException

from decorators._metaflow import job_errors
from estimator.errors import UserError

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


class Kubernetes:
    """The parts of the Metaflow class that are wrapped."""

    def __init__(self, error: Exception | None, job: Any = None) -> None:
        self.error, self._job = error, job

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


JOB = SimpleNamespace(_namespace="train")


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(job_errors, "stop_retrying", lambda: None)
    monkeypatch.setattr(job_errors, "kubernetes_job", lambda _: SimpleNamespace(what="jobset js-1"))
    return job_errors._with_kubernetes_errors(
        Kubernetes.wait,
        lambda error, submitted: UserError(f"{error}, {submitted or 'nothing submitted'}", "Do this."),
        lambda job: [f"a pod of {job.what} failed"],
    )


@pytest.mark.parametrize(
    ("job", "line"),
    [(None, "refused, nothing submitted"), (JOB, "refused, jobset js-1 in namespace train")],
)
def test_an_error_of_the_backend_is_reported_in_two_lines_and_not_retried(
    described: Any, job: Any, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        described(Kubernetes(ValueError("refused"), job))
    assert ended.value.code == METAFLOW_EXIT_DISALLOW_RETRY
    assert capsys.readouterr().err.splitlines() == ["Error:", line, "Do this."]


def test_the_pods_of_a_failed_step_are_described_before_its_error_is_raised(
    described: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    described(Kubernetes(None))
    with pytest.raises(MetaflowException):
        described(Kubernetes(MetaflowException("failed"), JOB))
    assert capsys.readouterr().err == "a pod of jobset js-1 failed\n"


@pytest.mark.parametrize(("command", "wrapped"), [("kubernetes", 1), ("batch", 0), ("run", 0), ("", 0)])
def test_a_backend_is_wrapped_once_and_only_in_processes_that_wait_for_its_jobs(
    command: str, wrapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_errors, "command_arguments", lambda: command.split())
    monkeypatch.setattr(job_errors, "_keep_cause_last", lambda _: None)
    kind, calls = SimpleNamespace(launch_job=lambda: None, wait=lambda: None, __module__="m"), []

    def wrap(original: Any) -> Any:
        calls.append(original)
        return SimpleNamespace(__wrapped__=original)

    for _ in range(2):
        job_errors._wrap(kind, "kubernetes", wrap)
    assert len(calls) == 2 * wrapped
