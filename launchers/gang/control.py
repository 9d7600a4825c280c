"""Control channel between the nodes' tasks: membership, failures with their cause, and the end of the gang.

It uses a separate connection (launchers.cluster.rendezvous) that works while a collective hangs. Node 0
(:class:`Hub`) listens, the other nodes (:class:`Member`) connect and join::

    hub -> member   start {port}                          all nodes have joined; port of torch's store
    both            beat                                  every second
    both            goodbye                               the sender leaves intentionally
    member -> hub   failed {failure} | part_stored {step} | step_timings {timings} | done
    member -> hub   drain {failure} | stopped {step, all}  the node must leave; its ranks wait after a step
    hub -> member   drain {failure} | final_step {step}    a node must leave; the final step of all ranks
    hub -> member   end {failure or null}                 the end, the same on every node

A member whose connection breaks is lost, and the run ends on all nodes, because collectives cannot continue
without it. A reconnecting member is therefore refused; the step's next attempt accepts it.

``Hub`` and ``Member`` share an interface (:class:`Control`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from estimator.errors import UserError
from launchers.cluster.channel import Connection, Unreachable, connect
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.cluster.greeting import Message, Refused
from launchers.cluster.rendezvous import Beat, Goodbye, NodeRequest, describe_loss
from launchers.gang.failures import Failure
from launchers.report.telemetry import StepTiming

_MAX_TRACEBACK = 1 << 18  # characters of a traceback's end that are sent to other nodes
_log = logging.getLogger(__name__)


class GangRequest(NodeRequest):
    """Join request of a node that continues after ``start_step``."""

    start_step: int = Field(ge=0)


class Start(Message):
    """From node 0 to all: every node has joined, the ranks may start."""

    kind: Literal["start"] = "start"
    port: int = Field(ge=1, le=65_535)  # port of torch's store on node 0


class Failed(Message):
    """From a node to node 0: a failure on that node."""

    kind: Literal["failed"] = "failed"
    failure: Failure


class PartStored(Message):
    """From a node to node 0: its part of the step's checkpoint is in the store."""

    kind: Literal["part_stored"] = "part_stored"
    step: int = Field(ge=0)


class StepTimings(Message):
    """From a node to node 0: seconds of its ranks' steps, in total and in collectives."""

    kind: Literal["step_timings"] = "step_timings"
    timings: tuple[StepTiming, ...]


class Done(Message):
    """From a node to node 0: its ranks have finished, and its checkpoints are stored."""

    kind: Literal["done"] = "done"


class Drain(Message):
    """A node must leave: sent to node 0, and from there to all. ``failure`` is the gang's resulting end."""

    kind: Literal["drain"] = "drain"
    failure: Failure


class Stopped(Message):
    """From a node to node 0: some of its ranks have stopped after a step, waiting for the final step."""

    kind: Literal["stopped"] = "stopped"
    step: int = Field(ge=0)  # highest step that one of the ranks has stopped after
    all: bool  # whether all ranks of the node have stopped


class FinalStep(Message):
    """From node 0 to all: the step after which every rank writes a checkpoint and stops."""

    kind: Literal["final_step"] = "final_step"
    step: int = Field(ge=0)


class End(Message):
    """From node 0 to all: how the gang has ended; no failure means success."""

    kind: Literal["end"] = "end"
    failure: Failure | None


Report = Failed | PartStored | StepTimings | Done | Drain | Stopped
GangMessage = Beat | Start | Report | FinalStep | Goodbye | End
MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[GangMessage, Field(discriminator="kind")])


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Limits of every wait, in seconds."""

    rendezvous: float = 300.0  # until the ranks of all nodes run
    lost_after: float = 10.0  # silence after which a node counts as lost
    settle: float = 2.0  # from the first failure to the verdict: another node may report the cause
    grace: float = 3.0  # from SIGTERM to SIGKILL
    leave: float = 30.0  # for the processes of finished ranks to exit
    upload: float = 1800.0  # for pending checkpoint uploads after training
    upload_after_failure: float = 10.0
    poll: float = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of the gang; ``failure`` None means success."""

    failure: Failure | None


class Control(ABC):
    """A node's end of the control channel; all calls except :meth:`join` return at once."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        self._address, self._timeouts, self._start_step = address, timeouts, start_step
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failures: list[Failure] = []
        self._first_failure: float | None = None  # monotonic
        self._drain_reason: Failure | None = None
        self._final_step: int | None = None
        self._verdict: Verdict | None = None

    @abstractmethod
    def join(self) -> int:
        """Wait for all nodes; returns torch's port. Raises GangFailed, or UserError when refused."""

    @abstractmethod
    def report(self, message: Report) -> None:
        """Report an event of this node to node 0."""

    @abstractmethod
    def last_step(self) -> int | None:
        """Return the step after which all ranks write a checkpoint and stop; None until it is chosen."""

    @abstractmethod
    def verdict(self) -> Verdict | None:
        """Return how the gang has ended; None until then."""

    @abstractmethod
    def close(self) -> None:
        """Send a goodbye, so that this node does not count as lost."""

    def leaving(self) -> Failure | None:
        """Return the failure with which the gang is to end because a node leaves; None if no node does."""
        with self._lock:
            return self._drain_reason

    def step_timings(self) -> tuple[StepTiming, ...]:
        """Return the step timings of all ranks reported since the last call (node 0 only)."""
        return ()

    def complete_steps(self) -> list[int]:
        """Return the steps whose checkpoints were completed since the last call (node 0 only)."""
        return []

    def peers_done(self) -> bool:
        """Return whether all other nodes are done; node 0 is the last, as it commits the checkpoints."""
        return True

    def parts_missing(self) -> bool:
        """Return whether another node may still store a part of a stored checkpoint (node 0 only)."""
        return False

    def _note(self, failure: Failure) -> None:
        """Add a failure; the caller holds the lock."""
        _log.info("Gang failure on node %d (%s): %s", failure.node, failure.kind, failure.message)
        self._failures.append(failure)
        self._first_failure = self._first_failure or time.monotonic()
        self._changed.notify_all()


def short(failure: Failure) -> Failure:
    """Truncate the failure's traceback to its end, to fit into one message."""
    return replace(failure, traceback=failure.traceback[-_MAX_TRACEBACK:])


def call_node_0(
    address: NodeAddress,
    request: NodeRequest,
    messages: TypeAdapter[Any],
    *,
    limit_s: float,
    silence_s: float,
    renew: Callable[[], Secret | None] = lambda: None,
) -> Connection[Any]:
    """Connect to node 0. Raises NodeLost if it is unreachable, UserError if it refuses this node."""
    try:
        return connect(address.endpoint, request, messages, limit_s=limit_s, silence_s=silence_s, renew=renew)
    except Refused as error:
        raise UserError(f"Node 0 refused this node: {error}.") from None
    except Unreachable as error:
        reason = f"it could not be reached within {limit_s:g} s ({error})"
        raise lost(0, address.main_host, reason).error() from None


def unexpected(request: NodeRequest) -> str:
    """Reason to refuse a node that the gang does not wait for."""
    return f"node {request.node} of {request.nodes} is not expected (any more)"


def absent(nodes: list[int], limit_s: float, *, joined: int, of: int) -> Failure:
    """Failure of nodes that did not join in time."""
    message = f"node {format_nodes(nodes)} did not join within {limit_s:g} s ({joined} of {of} joined)"
    return Failure.now("node", nodes[0], "?", message)


def format_nodes(nodes: list[int]) -> str:
    """Format node numbers; of more than eight, the first eight and the count of the rest."""
    return ", ".join(map(str, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def lost(node: int, host: str, reason: str) -> Failure:
    """Failure of a node that was lost."""
    return Failure.now("node", node, host, f"node {node} ({host}) was lost: {reason}")


def why_lost(error: Exception, lost_after: float) -> str:
    """Describe why the connection to a node ended."""
    broken = "its connection broke without a goodbye (its task was killed, or the machine failed)"
    return describe_loss(error, lost_after, sender="it", broken=broken)
