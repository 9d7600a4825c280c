"""Errors of a backend, in the process that waits for a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException

from decorators._metaflow import job_errors
from estimator.errors import UserError


class Kubernetes:
    """Metaflow's class, as far as it is wrapped."""

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
def test_an_error_of_the_backend_is_two_lines_and_not_retried(
    described: Any, job: Any, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        described(Kubernetes(ValueError("refused"), job))
    assert ended.value.code == METAFLOW_EXIT_DISALLOW_RETRY
    assert capsys.readouterr().err.splitlines() == [line, "Do this."]


def test_a_failed_step_is_raised_after_its_pods_are_described(
    described: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    described(Kubernetes(None))
    with pytest.raises(MetaflowException):
        described(Kubernetes(MetaflowException("failed"), JOB))
    assert capsys.readouterr().err == "a pod of jobset js-1 failed\n"


@pytest.mark.parametrize(("command", "wrapped"), [("kubernetes", 1), ("batch", 0), ("run", 0), ("", 0)])
def test_a_backend_is_wrapped_once_and_only_where_its_jobs_are_waited_for(
    command: str, wrapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_errors, "command_arguments", lambda: command.split())
    kind, calls = SimpleNamespace(launch_job=lambda: None, wait=lambda: None), []

    def wrap(original: Any) -> Any:
        calls.append(original)
        return SimpleNamespace(__wrapped__=original)

    for _ in range(2):
        job_errors._wrap(kind, "kubernetes", wrap)
    assert len(calls) == 2 * wrapped
