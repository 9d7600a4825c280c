"""Jobs that this process waits for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from metaflow._vendor import click

from decorators._metaflow.api_retries import limit_requests, retry_outages
from decorators._metaflow.commands import command_arguments
from decorators._metaflow.endings import end_step, print_line
from decorators._metaflow.signals import remove_job_at_signal
from estimator.errors import UserError


@dataclass(frozen=True, kw_only=True)
class WaitedJob:
    """Job that this process waits for: a Kubernetes Job or JobSet, or an AWS Batch job."""

    backend: Literal["kubernetes", "batch"]
    kind: Literal["job", "jobset", "batch job"]
    name: str  # of a Batch job, its id
    namespace: str = ""
    client: Any = None  # Batch: boto3's
    info: Mapping[str, Any] = field(default_factory=dict)  # Batch: latest result of describe_jobs

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}"

    def report_error(self, text: str) -> None:
        print_line(text)


_watchers: list[Callable[[WaitedJob], None]] = []


def watch_waiting(watcher: Callable[[WaitedJob], None]) -> None:
    """Call ``watcher`` whenever Metaflow polls the state of a remote job that this process waits for.

    If it raises a UserError, this process prints the error's two lines and exits, and the step is not
    retried.
    """
    if watcher in _watchers:
        return
    _watchers.append(watcher)
    if len(_watchers) > 1:
        return
    command = (command_arguments() or [""])[0]
    if command in ("batch", "kubernetes"):
        remove_job_at_signal()
    if command == "batch":
        from metaflow.plugins.aws.batch.batch_client import RunningJob as BatchJob

        _watch(BatchJob, batch_job)
    elif command == "kubernetes":
        from metaflow.plugins.kubernetes.kubernetes_job import RunningJob
        from metaflow.plugins.kubernetes.kubernetes_jobsets import RunningJobSet

        limit_requests()
        for kind, fetches in ((RunningJob, ("_fetch_job",)), (RunningJobSet, ("_fetch_jobset",))):
            for name in (*fetches, "_fetch_pod"):
                setattr(kind, name, retry_outages(getattr(kind, name)))
            _watch(kind, kubernetes_job)


def kubernetes_job(job: Any) -> WaitedJob:
    kind: Literal["job", "jobset"] = "job" if hasattr(job, "_job") else "jobset"
    return WaitedJob(backend="kubernetes", kind=kind, name=job._name, namespace=job._namespace)


def batch_job(job: Any) -> WaitedJob:
    return WaitedJob(backend="batch", kind="batch job", name=job._id, client=job._client, info=job._data)


def _watch(kind: type[Any], view: Callable[[Any], WaitedJob]) -> None:
    original: Any = kind.__dict__["is_done"]

    def is_done(self: Any) -> bool:
        done = bool(original.fget(self))
        if not done:
            try:
                for watcher in _watchers:
                    watcher(view(self))
            except UserError as error:
                end_step(error)
        return done

    kind.is_done = property(is_done)


def on_batch_client(prepare: Callable[[Any], None]) -> None:
    """Call ``prepare`` with each boto3 client that Metaflow creates to submit and watch Batch jobs."""
    if (command_arguments() or [""])[0] != "batch":
        return
    from metaflow.plugins.aws.batch.batch_client import BatchClient

    if hasattr(BatchClient.__init__, "__wrapped__"):
        return
    original = BatchClient.__init__

    @functools.wraps(original)
    def prepared(self: Any) -> None:
        original(self)
        prepare(self._client)

    BatchClient.__init__ = prepared


def waited_task() -> str:
    """Return the id of the task that this process waits for."""
    return str(click.get_current_context().params["task_id"])


def waited_attempt() -> tuple[str, str, int]:
    """Return (run, step, attempt) of the task that this process (``kubernetes step``) waits for."""
    params = click.get_current_context().params
    return str(params["run_id"]), str(params["step_name"]), int(params["retry_count"] or 0)
