"""What the nodes' tasks tell each other: who is there, who has failed and why, when all are done.

Over a channel (launchers.cluster.rendezvous) that still works when a collective hangs. Node 0 (:class:`Hub`)
listens, the others (:class:`Member`) connect and claim to be a node::

    hub -> member   go {port}                             all nodes are there; torch's port
    both            beat                                  each second
    member -> hub   failed {failure} | part {step} | paced {paces} | done | bye
    member -> hub   leave {failure} | stopped {step, all}  it has to go; ranks of it that wait after a step
    hub -> member   leave {failure} | last {step}         a node has to go; the step after which all do
    hub -> member   verdict {failure or null}             the end, the same on every node

A member that is cut off is lost, and the run ends on all nodes: its collectives could not go on without it.
So one that comes back is refused, in one line; the step's next attempt takes it in.

``Hub`` and ``Member`` have the same interface (:class:`Control`).
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
from launchers.report.telemetry import Pace

_LONGEST_TRACEBACK = 1 << 18  # characters of it, its end, that are told to other nodes
_log = logging.getLogger(__name__)


class GangRequest(NodeRequest):
    """Join request of a node that continues after ``start_step``."""

    start_step: int = Field(ge=0)


class Go(Message):
    """Node 0 to all: every node has joined, the ranks may start."""

    kind: Literal["go"] = "go"
    port: int = Field(ge=1, le=65_535)  # of torch's store on node 0


class Failed(Message):
    """A node to node 0: what has gone wrong on it."""

    kind: Literal["failed"] = "failed"
    failure: Failure


class PartStored(Message):
    """A node to node 0: its part of that step's checkpoint is in the store."""

    kind: Literal["part"] = "part"
    step: int = Field(ge=0)


class Paced(Message):
    """A node to node 0: how long its ranks' steps took, and how long they stood in collectives."""

    kind: Literal["paced"] = "paced"
    paces: tuple[Pace, ...]


class Done(Message):
    """A node to node 0: its ranks have finished, and its checkpoints are stored."""

    kind: Literal["done"] = "done"


class Leave(Message):
    """A node has to go: to node 0, and from there to all. The failure is how the gang is then to end."""

    kind: Literal["leave"] = "leave"
    failure: Failure


class Stopped(Message):
    """A node to node 0: ranks of it have stopped after a step, until it is known which is the last."""

    kind: Literal["stopped"] = "stopped"
    step: int = Field(ge=0)  # of the farthest
    all: bool  # of the node's ranks


class Last(Message):
    """Node 0 to all: the step after which every rank writes a checkpoint and stops."""

    kind: Literal["last"] = "last"
    step: int = Field(ge=0)


class End(Message):
    """Node 0 to all: how the gang has ended; no failure: well."""

    kind: Literal["verdict"] = "verdict"
    failure: Failure | None


Report = Failed | PartStored | Paced | Done | Leave | Stopped
GangMessage = Beat | Go | Report | Last | Goodbye | End
MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[GangMessage, Field(discriminator="kind")])


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """The limits of every wait, in seconds."""

    rendezvous: float = 300.0  # until the ranks of all nodes run
    lost_after: float = 10.0  # silence of a node
    settle: float = 2.0  # from the first failure: others may know the cause
    grace: float = 3.0  # from SIGTERM to SIGKILL
    leave: float = 30.0  # for ranks that have finished to end as processes
    upload: float = 1800.0  # for checkpoints that wait to be stored, after training
    upload_after_failure: float = 10.0
    poll: float = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the gang ended; ``failure`` None: well."""

    failure: Failure | None


class Control(ABC):
    """A node's end of the control channel; all calls except :meth:`join` return at once."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        self._address, self._timeouts, self._start_step = address, timeouts, start_step
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failures: list[Failure] = []
        self._first_failure: float | None = None  # monotonic
        self._leaving: Failure | None = None
        self._last: int | None = None
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
        """Say goodbye, so that this node does not count as lost."""

    def leaving(self) -> Failure | None:
        """Return the failure with which the gang is to end because a node leaves; None if no node does."""
        with self._lock:
            return self._leaving

    def paces(self) -> tuple[Pace, ...]:
        """Return the paces of all nodes' ranks reported since the last call (node 0 only)."""
        return ()

    def whole_steps(self) -> list[int]:
        """Return the checkpoints of which the last part was stored since the last call (node 0 only)."""
        return []

    def others_done(self) -> bool:
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
    """The failure with the end of its traceback only, to fit into one message."""
    return replace(failure, traceback=failure.traceback[-_LONGEST_TRACEBACK:])


def call_node_0(
    address: NodeAddress,
    request: NodeRequest,
    messages: TypeAdapter[Any],
    *,
    limit_s: float,
    silence_s: float,
    renew: Callable[[], Secret | None] = lambda: None,
) -> Connection[Any]:
    """Connect to node 0. Raises NodeLost if it can't be reached, UserError if it refuses this node."""
    try:
        return connect(address.endpoint, request, messages, limit_s=limit_s, silence_s=silence_s, renew=renew)
    except Refused as error:
        raise UserError(f"Node 0 refused this node: {error}.") from None
    except Unreachable as error:
        why = f"it could not be reached within {limit_s:g} s ({error})"
        raise lost(0, address.main_host, why).error() from None


def unexpected(request: NodeRequest) -> str:
    """Reason to refuse a node that the gang does not wait for."""
    return f"node {request.node} of {request.nodes} is not expected (any more)"


def absent(nodes: list[int], limit_s: float, *, joined: int, of: int) -> Failure:
    """Failure of nodes that did not join in time."""
    message = f"node {some(nodes)} did not come within {limit_s:g} s ({joined} of {of} were there)"
    return Failure(kind="node", node=nodes[0], host="?", at=time.time(), message=message)


def some(nodes: list[int]) -> str:
    """Format node numbers; of more than eight, the first eight and the count of the rest."""
    return ", ".join(map(str, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def lost(node: int, host: str, why: str) -> Failure:
    message = f"node {node} ({host}) was lost: {why}"
    return Failure(kind="node", node=node, host=host, at=time.time(), message=message)


def why_lost(error: Exception, lost_after: float) -> str:
    broken = "its connection broke without a goodbye (its task was killed, or the machine went away)"
    return describe_loss(error, lost_after, sender="it", broken=broken)
