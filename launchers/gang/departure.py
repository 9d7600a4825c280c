"""Graceful departure of a node: its task makes the ranks stop after the gang's final step.

See launchers.gang.leaving for the ranks' side. Node 0 ends the gang when that step's checkpoint is complete
in the store. The departing node waits for this only within its grace period, and then ends without it.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from launchers.cluster.processes import WaitingSignals
from launchers.gang.agent import IGNORED_VARIABLE
from launchers.gang.control import Control, Drain, Failed, Stopped
from launchers.gang.failures import Failure
from launchers.gang.leaving import folder_of, read_number
from launchers.gang.rank import write_atomically
from launchers.gang.script_job import GangJob
from launchers.gang.uploads import Uploads

ENDING_S = 10.0  # part of the grace period reserved to end the processes and store the logs


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """Signals that announce a node's end, and the seconds that remain after them."""

    seconds: float = 0.0
    signals: tuple[int, ...] = ()
    sent_to_all: bool = False
    """Whether whoever sends them sends them to all processes of the node, as Slurm does."""

    @property
    def storing_s(self) -> float:
        """Part of the grace period that a checkpoint may take."""
        return max(self.seconds - ENDING_S, self.seconds / 2)

    def environment(self) -> dict[str, str]:
        """Variables by which the agent and the ranks leave the signals to the node's task."""
        names = ",".join(signal.Signals(number).name for number in self.signals)
        return {IGNORED_VARIABLE: names} if self.sent_to_all else {}


NO_GRACE = Grace()


class Departure:
    """Graceful departure as seen by one node. ``ranks``: the ranks of this node."""

    def __init__(
        self, job: GangJob, node: int, ranks: range, control: Control, uploads: Uploads, grace: Grace
    ) -> None:
        self._node, self._ranks = node, ranks
        self._folder = folder_of(job.work_dir)
        self._control, self._uploads = control, uploads
        self._grace = grace
        self._deadline: tuple[float, Callable[[], None]] | None = None  # monotonic, deferred signal action
        self._stop_requested = self._final_step_written = False
        self._stopped = 0  # stopped ranks of this node
        self.possible = False  # whether a step has been trained, so that there is progress to store

    def poll(self, signals: WaitingSignals) -> None:
        """Handle signals and departures; call it often.

        Raises what a signal's handler raises, if the signal cannot be deferred.
        """
        number = signals.take()
        if number is not None:
            if self.possible and number in self._grace.signals and self._deadline is None:
                deadline = time.monotonic() + self._grace.storing_s
                self._deadline = (deadline, lambda: signals.act(number))
                host = socket.gethostname()
                message = f"node {self._node} ({host}) has to leave ({signal.Signals(number).name})"
                self._control.report(Drain(failure=Failure.now("left", self._node, host, message)))
            else:
                signals.act(number)
        if (leaving := self._control.leaving()) is not None:
            self._stop_ranks(leaving)
        if self._deadline is not None and time.monotonic() > self._deadline[0]:
            self._deadline[1]()

    def _stop_ranks(self, leaving: Failure) -> None:
        if not self._stop_requested:
            write_atomically(self._folder / "asked", leaving.message)
            self._stop_requested = True
        stopped_after = (read_number(self._folder / f"rank-{rank:05d}.json") for rank in self._ranks)
        steps = [step for step in stopped_after if step is not None]
        if len(steps) > self._stopped:
            self._stopped = len(steps)
            self._control.report(Stopped(step=max(steps), all=len(steps) == len(self._ranks)))
        last = self._control.last_step()
        if last is None:
            return
        if not self._final_step_written:
            write_atomically(self._folder / "step", str(last))
            self._final_step_written = True
        if last in self._uploads.committed:
            stored = f"{leaving.message}; all have stopped, and the checkpoint of step {last} is stored"
            failure = replace(leaving, message=stored, at=time.time())
            self._control.report(Failed(failure=failure))
