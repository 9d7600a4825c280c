"""A node's task when a node has to go: its ranks stop after the gang's last step (launchers.gang.leaving).

Node 0 ends the gang when the checkpoint of that step is whole in the store. The node that has to go waits for
this no longer than its grace allows, and ends without it then.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from launchers.cluster.processes import WaitingSignals
from launchers.gang.control import Control, Failed, Leave, Stopped
from launchers.gang.failures import Failure
from launchers.gang.job import TrainJob
from launchers.gang.leaving import folder_of, read_number, write_whole
from launchers.gang.uploads import Uploads

IGNORED_VARIABLE = "FINETUNE_IGNORED_SIGNALS"  # names with commas, for launchers.gang.agent
ENDING_S = 10.0  # of a grace: to end the processes and keep the logs


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """Signals after which this node isn't gone at once, and the seconds that it has then."""

    seconds: float = 0.0
    signals: tuple[int, ...] = ()
    sent_to_all: bool = False
    """Whether whoever sends them sends them to all processes of the node, as Slurm does."""

    @property
    def storing_s(self) -> float:
        """What of it a checkpoint may take."""
        return max(self.seconds - ENDING_S, self.seconds / 2)

    def environment(self) -> dict[str, str]:
        """Variables by which the agent and the ranks leave the signals to the node's task."""
        names = ",".join(signal.Signals(number).name for number in self.signals)
        return {IGNORED_VARIABLE: names} if self.sent_to_all else {}


NO_GRACE = Grace()


class Departure:
    """Of one node. ``ranks``: those of this node."""

    def __init__(
        self, job: TrainJob, node: int, ranks: range, control: Control, uploads: Uploads, grace: Grace
    ) -> None:
        self._node, self._ranks = node, ranks
        self._folder = folder_of(job.work_dir)
        self._control, self._uploads = control, uploads
        self._grace = grace
        self._act_at_last: tuple[float, Callable[[], None]] | None = None  # monotonic, what the signal does
        self._is_asked = self._is_chosen = False
        self._stopped = 0  # ranks of this node
        self.possible = False  # whether there is something to keep: a step has been made

    def look(self, signals: WaitingSignals) -> None:
        """Call it often. Raises what a signal's handler raises, where the signal is not to wait."""
        number = signals.take()
        if number is not None:
            if self.possible and number in self._grace.signals and self._act_at_last is None:
                deadline = time.monotonic() + self._grace.storing_s
                self._act_at_last = (deadline, lambda: signals.act(number))
                self._control.report(Leave(failure=self._to_go(number)))
            else:
                signals.act(number)
        if (leaving := self._control.leaving()) is not None:
            self._stop_ranks(leaving)
        if self._act_at_last is not None and time.monotonic() > self._act_at_last[0]:
            self._act_at_last[1]()

    def _stop_ranks(self, leaving: Failure) -> None:
        if not self._is_asked:
            write_whole(self._folder / "asked", leaving.message)
            self._is_asked = True
        steps = [step for rank in self._ranks if (step := self._stopped_after(rank)) is not None]
        if len(steps) > self._stopped:
            self._stopped = len(steps)
            self._control.report(Stopped(step=max(steps), all=len(steps) == len(self._ranks)))
        last = self._control.last_step()
        if last is None:
            return
        if not self._is_chosen:
            write_whole(self._folder / "step", str(last))
            self._is_chosen = True
        if last in self._uploads.committed:
            stored = f"{leaving.message}; all have stopped, and the checkpoint of step {last} is stored"
            failure = replace(leaving, message=stored, at=time.time())
            self._control.report(Failed(failure=failure))

    def _stopped_after(self, rank: int) -> int | None:
        return read_number(self._folder / f"rank-{rank:05d}.json")

    def _to_go(self, number: int) -> Failure:
        host = socket.gethostname()
        return Failure(
            kind="left",
            node=self._node,
            host=host,
            at=time.time(),
            message=f"node {self._node} ({host}) has to go ({signal.Signals(number).name})",
        )
