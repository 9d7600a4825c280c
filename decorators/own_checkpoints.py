"""Checkpoint folder of a step's own script: ``current.gpu_profile.checkpoint_dir``.

The folder is on the node's disk; launchers.store.synced_folder keeps it in the run's datastore.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from metaflow import current

from decorators.storage import datastore, origin_run_ids
from estimator.terminal import print
from launchers.base.workdir import work_folder
from launchers.store.synced_folder import SyncedFolder


def foreach_index(flow: Any) -> str:
    """Return the place of this task in the foreach steps around it, the same in a retry and a resumed run."""
    frames = [str(index) for index, *_ in flow.foreach_stack() or []]
    if getattr(current, "parallel", None) and current.parallel.num_nodes > 1:
        frames = frames[:-1]  # the nodes share their checkpoints
    return "-".join(frames)


class OwnCheckpoints:
    """The folder of one task, restored from an earlier attempt or the run that this one was resumed from.

    ``index``: the task's :func:`foreach_index`. Raises UserError if the folder cannot be restored.
    """

    def __init__(self, index: str) -> None:
        step, parallel = current.step_name, getattr(current, "parallel", None)

        def prefix(run: Any) -> str:
            return (
                f"runs/{run}/own-checkpoints/{step}-{index}"
                if index
                else f"runs/{run}/own-checkpoints/{step}"
            )

        self._work_folder = contextlib.ExitStack()
        folder = self._work_folder.enter_context(
            work_folder(str(current.run_id), f"{step}-checkpoints", str(current.task_id))
        )
        self._synced = SyncedFolder(
            datastore(),
            prefix(current.run_id),
            folder / "checkpoints",
            node=parallel.node_index if parallel else 0,
        )
        self.folder: Path = self._synced.folder
        if self._synced.restore([prefix(run) for run in origin_run_ids()]):
            print(f"Checkpoints of an earlier attempt are in {self.folder}", flush=True)
        self._synced.start()

    def end(self, *, succeeded: bool) -> None:
        """Store the last state of the folder and remove it from this disk, when the step's code has ended."""
        with self._work_folder:
            self._synced.stop(complete=succeeded)
