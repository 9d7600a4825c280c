"""A node that is told to go: all ranks write a checkpoint after the same step, and then wait to be ended.

Steps are no moments that nodes share: one rank may have begun the next while another still ends this one. So
node 0 chooses, through the control channel (launchers.gang.control)::

    leave/asked              written by each node's task: ranks stop at the end of their step
    leave/rank-00001.json    by a rank that has: its step
    leave/step               by the task: the step after which all write a checkpoint

The ranks of a gang exchange gradients in each step. So while one has stopped after step K none can end K + 1,
and node 0 may choose K + 1 as soon as it knows of one; or K, when all have stopped after it.
"""

from __future__ import annotations

import time
from pathlib import Path

from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv

DECISION_S = 60.0  # that a rank waits for node 0's choice
_POLL_S = 0.02


def folder_of(work_dir: Path) -> Path:
    """Where a node's task and its ranks speak of leaving."""
    return work_dir / "leave"


class Cadence:
    """When a rank writes checkpoints: every few steps, and before its gang leaves."""

    def __init__(self, job: TrainJob, env: RankEnv) -> None:
        self._job = job
        self._folder = folder_of(job.work_dir)
        self._own = self._folder / f"rank-{env.rank:05d}.json"
        self._last: int | None = None  # the step that was chosen

    def is_due(self, step: int) -> bool:
        """Whether to write the checkpoint of a step that has just ended; asked on every rank alike.

        Waits where a node has to go, until it is known after which step all do.
        """
        if step == self._job.total_steps:  # the result follows
            return False
        if self._last is None and (self._folder / "asked").exists():
            self._last = self._choice(step)
        every = self._job.checkpoint_every
        return step == self._last or bool(every and step % every == 0)

    def wrote(self, step: int) -> None:
        """The checkpoint of that step is written: go on, or wait to be ended where it was the last."""
        while step == self._last:
            time.sleep(1)

    def _choice(self, step: int) -> int:
        write_whole(self._own, str(step))
        deadline = time.monotonic() + DECISION_S
        while time.monotonic() < deadline:
            if (choice := read_number(self._folder / "step")) is not None:
                return choice
            time.sleep(_POLL_S)
        return 0  # no step: nobody decides any more, and the gang is ended another way


def write_whole(path: Path, text: str) -> None:
    """A small file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def read_number(path: Path) -> int | None:
    """What :func:`write_whole` has written; None: nothing yet."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
