"""Resubmission of a remote step as the same attempt, after its job failed because of the cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from typing import Any

from metaflow._vendor import click
from metaflow.exception import MetaflowException

from decorators._metaflow.commands import Backend, command_arguments
from decorators._metaflow.jobs import WaitedJob, batch_job, kubernetes_job

_installed = False


def submit_again(backend: Backend, decide: Callable[[WaitedJob], bool]) -> None:
    """Call ``decide`` whenever a step's job on this backend fails; if it returns True, submit the job again.

    For the process that waits for the job. The task's log starts from the beginning again, because its reader
    can only follow a growing log.
    """
    global _installed
    if (command_arguments() or [""])[0] != backend or _installed:
        return
    _installed = True
    if backend == "kubernetes":
        from metaflow.plugins.kubernetes.kubernetes import Kubernetes

        _repeat(Kubernetes, lambda waiting: kubernetes_job(waiting._job), decide)
    else:
        from metaflow.plugins.aws.batch.batch import Batch

        _repeat(Batch, lambda waiting: batch_job(waiting.job), decide)


def _repeat(kind: type[Any], waited: Callable[[Any], WaitedJob], decide: Callable[[WaitedJob], bool]) -> None:
    launch, original_wait = kind.launch_job, kind.wait

    def launch_job(self: Any, *arguments: Any, **options: Any) -> None:
        self._launch_arguments = arguments, options
        launch(self, *arguments, **options)

    def wait(self: Any, *locations: str, echo: Any = None) -> None:
        while True:
            try:
                original_wait(self, *locations, echo=echo)
            except MetaflowException:
                if not decide(waited(self)):
                    raise
            else:
                return
            _empty(click.get_current_context().obj.flow_datastore._storage_impl, locations)
            arguments, options = self._launch_arguments
            self.launch_job(*arguments, **options)

    kind.launch_job, kind.wait = launch_job, wait


def leave_no_record() -> None:
    """Discard the results of a task that ends because the cluster took a node away, as if it had been killed.

    For a pod or a Batch job, where the same attempt may run again. A metadata service keeps the first record
    of an attempt's artifact, so the artifacts of this task, including ``_task_ok``, would count as the step's
    result.
    """
    if not os.environ.keys() & {"METAFLOW_KUBERNETES_WORKLOAD", "AWS_BATCH_JOB_ID"}:
        return
    from metaflow.datastore.task_datastore import TaskDataStore

    TaskDataStore.done = lambda _: None  # it registers artifacts and marks the attempt as done


def _empty(storage: Any, locations: tuple[str, ...]) -> None:
    paths = [location.removeprefix(storage.datastore_root).lstrip("/") for location in locations]
    storage.save_bytes(((path, BytesIO()) for path in paths), overwrite=True, len_hint=len(paths))
