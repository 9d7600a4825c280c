"""A remote step whose job has failed through no fault of its own, submitted again as the same attempt."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from typing import Any

from metaflow.exception import MetaflowException

from decorators._metaflow.commands import command_words
from decorators._metaflow.jobs import WaitedJob, kubernetes_job

_installed = False


def submit_again(decide: Callable[[WaitedJob], bool]) -> None:
    """Ask ``decide`` whenever a step's Job or JobSet has failed; on True it is submitted again.

    For the process that waits for it. The task's log begins anew: its reader here knows only one that grows.
    """
    global _installed
    if (command_words() or [""])[0] != "kubernetes" or _installed:
        return
    _installed = True
    from metaflow.plugins.kubernetes.kubernetes import Kubernetes

    launch, own_wait = Kubernetes.launch_job, Kubernetes.wait

    def launch_job(self: Any, **asked: Any) -> None:
        self._asked = asked
        launch(self, **asked)

    def wait(self: Any, *locations: str, echo: Any = None) -> None:
        while True:
            try:
                own_wait(self, *locations, echo=echo)
            except MetaflowException:
                if not decide(kubernetes_job(self._job)):
                    raise
            else:
                return
            _empty(self._datastore._storage_impl, locations)
            self.launch_job(**self._asked)

    Kubernetes.launch_job, Kubernetes.wait = launch_job, wait


def leave_no_record() -> None:
    """In a task that ends as the cluster has taken a node away: keep nothing of it, as of one that is killed.

    On Kubernetes, where the same attempt may be made again. A metadata service keeps the first record of an
    attempt's artifact, so that those of this end, ``_task_ok`` among them, would stand for the step's result.
    """
    if "METAFLOW_KUBERNETES_WORKLOAD" not in os.environ:
        return
    from metaflow.datastore.task_datastore import TaskDataStore

    TaskDataStore.done = _keep_nothing


def _keep_nothing(_: Any) -> None:
    """In place of ``TaskDataStore.done``, which registers the artifacts and marks the attempt as done."""


def _empty(storage: Any, locations: tuple[str, ...]) -> None:
    paths = [location.removeprefix(storage.datastore_root).lstrip("/") for location in locations]
    storage.save_bytes(((path, BytesIO()) for path in paths), overwrite=True, len_hint=len(paths))
