"""Messages for jobs that a cluster rejects or aborts."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from metaflow.datastore.flow_datastore import FlowDataStore
from metaflow.exception import MetaflowException

from decorators._metaflow.api_retries import stop_retrying
from decorators._metaflow.commands import command_arguments
from decorators._metaflow.endings import end_step, print_line
from decorators._metaflow.jobs import WaitedJob, batch_job, kubernetes_job
from estimator.errors import UserError

_log = logging.getLogger(__name__)
_DELETED = "Unable to locate Kubernetes"  # Metaflow's message for a Job or JobSet that is gone


def explain_batch_errors(
    explain: Callable[[Exception, str], UserError], on_failure: Callable[[WaitedJob], None]
) -> None:
    """Print two lines instead of a traceback if submitting a step to AWS Batch or waiting for it raises.

    ``explain(exception, id)`` returns them; ``id`` names a job that still runs, or is empty. For a step that
    failed ``on_failure`` is called.
    """
    from metaflow.plugins.aws.batch.batch import Batch

    _wrap(Batch, "batch", lambda call: _with_batch_errors(call, explain, on_failure))


def _wrap(kind: Any, backend: str, wrapped: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Wrap ``launch_job`` and ``wait``, once, in the process that waits for a job of this backend."""
    if command_arguments()[:1] == [backend] and not hasattr(kind.wait, "__wrapped__"):
        _keep_cause_last(f"{kind.__module__}_cli")
        kind.launch_job, kind.wait = wrapped(kind.launch_job), wrapped(kind.wait)


def _with_batch_errors(
    original: Callable[..., None],
    explain: Callable[[Exception, str], UserError],
    on_failure: Callable[[WaitedJob], None],
) -> Callable[..., None]:
    @functools.wraps(original)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            # Removed, because Metaflow's exit handler would query it again and print another traceback
            job = self.__dict__.pop("job", None)
            if isinstance(error, MetaflowException) and job is not None:
                on_failure(batch_job(job))
                raise  # the step failed: Metaflow prints the reason in one line
            end_step(explain(error, job.id if job is not None and not _terminated(job) else ""))

    return explained


def _terminated(job: Any) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        job._client.terminate_job(jobId=job.id, reason="the process that waited for it has ended")
    except (BotoCoreError, ClientError):
        return False
    return True


def explain_kubernetes_errors(
    explain: Callable[[Exception, str], UserError], describe_pods: Callable[[WaitedJob], list[str]]
) -> None:
    """Print two lines instead of a traceback if submitting a step to Kubernetes or waiting for it raises.

    ``explain(exception, submitted)`` returns them; ``submitted`` is the name and namespace of the submitted
    job, or empty. ``describe_pods`` adds a line per pod of a step that failed.
    """
    from metaflow.plugins.kubernetes.kubernetes import Kubernetes

    _wrap(Kubernetes, "kubernetes", lambda call: _with_kubernetes_errors(call, explain, describe_pods))


def _with_kubernetes_errors(
    original: Callable[..., None],
    explain: Callable[[Exception, str], UserError],
    describe_pods: Callable[[WaitedJob], list[str]],
) -> Callable[..., None]:
    """Wrap Metaflow's wait for a Kubernetes job: print why its pods failed, and explain other errors."""

    @functools.wraps(original)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        job = None
        try:
            original(self, *args, **kwargs)
            atexit.register(stop_retrying)  # runs before Metaflow's handler, which queries the job once more
        except Exception as error:
            job = getattr(self, "_job", None)
            if isinstance(error, MetaflowException) and job is not None:
                for line in describe_pods(kubernetes_job(job)):
                    print_line(line)
                if str(error).startswith(_DELETED):
                    waited = kubernetes_job(job)
                    error.message = f"The {waited.what} in namespace {waited.namespace} was deleted."
                raise
            name = f"{kubernetes_job(job).what} in namespace {job._namespace}" if job is not None else ""
            stop_retrying()
            end_step(explain(error, name))

    return explained


def _keep_cause_last(command_module: str) -> None:
    """Suppress follow-up errors of a step that has failed, so that its cause is the last message.

    With local metadata Metaflow copies the task's records when the wait ends, in any way. A task that never
    started has none, and an unavailable datastore cannot be read: both raise another error.
    """
    module: Any = import_module(command_module)
    read, copy = FlowDataStore.get_task_datastore, module.sync_local_metadata_from_datastore

    @functools.wraps(read)
    def get_task_datastore(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _unless_failing(lambda: read(self, *args, **kwargs))

    def sync_local_metadata_from_datastore(folder: str, task_datastore: Any) -> None:
        if task_datastore is not None:
            _unless_failing(lambda: copy(folder, task_datastore))

    FlowDataStore.get_task_datastore = get_task_datastore
    module.sync_local_metadata_from_datastore = sync_local_metadata_from_datastore


def _unless_failing(function: Callable[[], Any]) -> Any:
    """Call ``function``; None instead of its error while another exception ends the step."""
    cause = sys.exc_info()[1]
    try:
        return function()
    except Exception as error:
        if cause is None:
            raise
        _log.debug("Records of the failed step were not copied: %s", error)
        return None
