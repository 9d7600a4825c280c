"""Graceful departure inside the ranks: all write a checkpoint after the same step, then wait to be ended.

Ranks do not finish a step at the same moment: one may have started the next step while another still works on
this one. So node 0 chooses the final step through the control channel (launchers.gang.control)::

    leave/asked              written by each node's task: ranks stop at the end of their step
    leave/rank-00001.json    written by a stopped rank: its step
    leave/step               written by the task: the final step, after which all write a checkpoint

The ranks of a gang exchange gradients in every step. While one rank has stopped after step K, no rank can
finish K + 1; so node 0 may choose K + 1 as soon as it learns of one stopped rank, or K once all have stopped
after it.
"""

from __future__ import annotations

import time
from pathlib import Path

from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, write_atomically

DECISION_S = 60.0  # time limit for node 0's choice
_POLL_S = 0.02


def folder_of(work_dir: Path) -> Path:
    """Return the folder in which a node's task and its ranks coordinate a departure."""
    return work_dir / "leave"


class Cadence:
    """Checkpoint schedule of a rank: every few steps, and before its gang leaves."""

    def __init__(self, job: TrainJob, env: RankEnv) -> None:
        self._job = job
        self._folder = folder_of(job.work_dir)
        self._file = self._folder / f"rank-{env.rank:05d}.json"
        self._last: int | None = None  # the chosen final step

    def writes_after(self, step: int) -> bool:
        """Whether to write a checkpoint after this step; every rank calls it with the same steps.

        If a node has to leave, waits until the final step is known.
        """
        if step == self._job.total_steps:  # the result follows
            return False
        if self._last is None and (self._folder / "asked").exists():
            self._last = self._final_step(step)
        interval = self._job.checkpoint_every
        return step == self._last or bool(interval and step % interval == 0)

    def finish(self, step: int) -> None:
        """Continue after the step's checkpoint was written; after the final step, wait to be ended."""
        while step == self._last:
            time.sleep(1)

    def _final_step(self, step: int) -> int:
        """Report that this rank has stopped after ``step``; wait for the final step that node 0 selects."""
        write_atomically(self._file, str(step))
        deadline = time.monotonic() + DECISION_S
        while time.monotonic() < deadline:
            if (choice := read_number(self._folder / "step")) is not None:
                return choice
            time.sleep(_POLL_S)
        return 0  # no step: without a decision the gang is ended by its failure


def read_number(path: Path) -> int | None:
    """Read a number written by :func:`launchers.gang.rank.write_atomically`; None if absent."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
