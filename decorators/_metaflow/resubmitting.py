"""A remote step whose job has failed through no fault of its own, submitted again as the same attempt."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from typing import Any

from metaflow._vendor import click
from metaflow.exception import MetaflowException

from decorators._metaflow.commands import Backend, command_words
from decorators._metaflow.jobs import WaitedJob, batch_job, kubernetes_job

_installed = False


def submit_again(backend: Backend, decide: Callable[[WaitedJob], bool]) -> None:
    """Ask ``decide`` whenever a step's job on that backend has failed; on True it is submitted again.

    For the process that waits for it. The task's log begins again: its reader here knows only one that grows.
    """
    global _installed
    if (command_words() or [""])[0] != backend or _installed:
        return
    _installed = True
    if backend == "kubernetes":
        from metaflow.plugins.kubernetes.kubernetes import Kubernetes

        _repeat(Kubernetes, lambda waiting: kubernetes_job(waiting._job), decide)
    else:
        from metaflow.plugins.aws.batch.batch import Batch

        _repeat(Batch, lambda waiting: batch_job(waiting.job), decide)


def _repeat(kind: type[Any], waited: Callable[[Any], WaitedJob], decide: Callable[[WaitedJob], bool]) -> None:
    launch, own_wait = kind.launch_job, kind.wait

    def launch_job(self: Any, *words: Any, **asked: Any) -> None:
        self._asked = words, asked
        launch(self, *words, **asked)

    def wait(self: Any, *locations: str, echo: Any = None) -> None:
        while True:
            try:
                own_wait(self, *locations, echo=echo)
            except MetaflowException:
                if not decide(waited(self)):
                    raise
            else:
                return
            _empty(click.get_current_context().obj.flow_datastore._storage_impl, locations)
            words, asked = self._asked
            self.launch_job(*words, **asked)

    kind.launch_job, kind.wait = launch_job, wait


def leave_no_record() -> None:
    """In a task that ends as the cluster has taken a node away: keep nothing of it, as of one that is killed.

    In a pod or a Batch job, where the same attempt may be made again. A metadata service keeps the first
    record of an attempt's artifact, so that those of this end, ``_task_ok`` among them, would stand for the
    step's result.
    """
    if not os.environ.keys() & {"METAFLOW_KUBERNETES_WORKLOAD", "AWS_BATCH_JOB_ID"}:
        return
    from metaflow.datastore.task_datastore import TaskDataStore

    TaskDataStore.done = _keep_nothing


def _keep_nothing(_: Any) -> None:
    """In place of ``TaskDataStore.done``, which registers the artifacts and marks the attempt as done."""


def _empty(storage: Any, locations: tuple[str, ...]) -> None:
    paths = [location.removeprefix(storage.datastore_root).lstrip("/") for location in locations]
    storage.save_bytes(((path, BytesIO()) for path in paths), overwrite=True, len_hint=len(paths))
