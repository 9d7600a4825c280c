"""Upload of a node's checkpoints from a thread of the node's task, in parallel to training."""

from __future__ import annotations

import queue
import shutil
import threading
from pathlib import Path

from launchers.gang.control import Control, PartStored
from launchers.gang.script_job import GangJob
from launchers.store.checkpoints import CheckpointStore


class Uploads:
    """Uploads finished checkpoint folders to the store; on node 0, also commits complete checkpoints.

    Without a store, the newest ``settings.keep_checkpoints`` stay in the work folder.
    """

    def __init__(self, job: GangJob, node: int, store: CheckpointStore | None, control: Control) -> None:
        self._job = job
        self._node = node
        self._store = store
        self._control = control
        layout = job.layout
        first = node * layout.processes_per_node
        self._ranks = range(first, first + layout.processes_per_node)
        self._queued: set[Path] = set()
        self._queue: queue.Queue[tuple[int, Path | None]] = queue.Queue()
        self.error: Exception | None = None
        self.committed: list[int] = []  # steps of committed checkpoints, on node 0
        threading.Thread(target=self._work, name="gang-uploads", daemon=True).start()

    def poll(self) -> None:
        """Queue uploads and commits that are ready; call it often, it returns at once.

        Commits are queued before new parts, so events that a rank reported before its part are received by
        then.
        """
        for step in self._control.complete_steps():
            self._queue.put((step, None))
        for step, folder in self._finished():
            if folder not in self._queued:
                self._queued.add(folder)
                self._queue.put((step, folder))

    @property
    def idle(self) -> bool:
        """Whether all queued uploads are finished."""
        return self._queue.unfinished_tasks == 0

    def remove_unfinished(self) -> None:
        """Remove checkpoints that no rank will finish. Call it only after the ranks have ended."""
        finished = {folder for _, folder in self._finished()}
        for folder in self._job.checkpoints_dir.glob("step-*"):
            if folder not in finished and not self._is_resumed_from(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _finished(self) -> list[tuple[int, Path]]:
        return [
            (int(folder.name.removeprefix("step-")), folder)
            for folder in sorted(self._job.checkpoints_dir.glob("step-*"))
            if folder.name.removeprefix("step-").isdigit()
            and not self._is_resumed_from(folder)
            and all((folder / f"rank-{rank:05d}.json").exists() for rank in self._ranks)
        ]

    def _is_resumed_from(self, folder: Path) -> bool:
        resumed = self._job.resume_dir
        return resumed is not None and (folder == resumed or folder in resumed.parents)

    def _work(self) -> None:
        while True:
            step, folder = self._queue.get()
            try:
                if self.error is None:
                    self._remove_old() if self._store is None else self._put(self._store, step, folder)
            except Exception as error:  # noqa: BLE001 the task reports it
                self.error = error
            finally:
                self._queue.task_done()

    def _put(self, store: CheckpointStore, step: int, folder: Path | None) -> None:
        """Store this node's part of a checkpoint; if ``folder`` is None, commit the checkpoint."""
        if folder is not None:
            store.put_part(step, self._node, folder)
            self._control.report(PartStored(step=step))
            shutil.rmtree(folder, ignore_errors=True)
            return
        store.commit(
            step,
            nodes=self._job.layout.nodes,
            world_size=self._job.layout.world_size,
            extra=self._job.checkpoint_notes,
        )
        self.committed.append(step)

    def _remove_old(self) -> None:
        for _, folder in self._finished()[: -self._job.keep_checkpoints]:
            shutil.rmtree(folder, ignore_errors=True)
