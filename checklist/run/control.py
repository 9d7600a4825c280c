"""Messages between node agents and rank 0: positions in operations, measurements.

Over a channel (launchers.cluster.rendezvous) that is not the collectives' own network path, so that it still
works when a collective hangs. Rank 0's node agent listens (:class:`Hub`), every node agent calls
(:func:`join`), rank 0's too, and claims its ranks::

    hub -> node agent   do {rank, id, what, arguments} | restart {ranks} | where {id, ranks} | clock {at}
                        | end {measurements, status} | end {error, advice} | beat
    node agent -> hub   from {rank, reply}                what a worker has answered
                        ended {rank, reason}                 a worker has ended by itself
                        at {ranks: {rank: [operation, sequence, state]}} | clock {at, now} | beat

Two node agents that claim one rank at the same time receive each other's host. A disconnected node agent may
join again: its ranks are free as soon as rank 0 has noticed the end of its connection.
"""

from __future__ import annotations

import queue
import socket
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from checklist.run.rendezvous import PORT_OFFSET, Rendezvous
from estimator.errors import UserError
from launchers.cluster.channel import Connection, Unreachable, connect
from launchers.cluster.greeting import BadMessage, Message, Refused
from launchers.cluster.rendezvous import Beat, JoinRequest, Peer, Server, describe_loss

BEAT_S = 0.5
_PARTING_S = 5.0  # time for node agents to read their last message, even over a slow link
_KNOCKS = 2  # number of ports probed again after rank 0 was unreachable
_SSH = 22
_LONGEST = 64 << 20  # bytes; the measurements of a thousand nodes are one message

Position = tuple[str, int, str]  # operation, sequence, and the process's state as the kernel gives it


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Time limits of every wait, in seconds."""

    rendezvous: float = 60.0  # until all ranks have joined
    operation: float = 30.0  # one collective, or another command of a worker
    connect: float = 2.0  # connecting a socket between two nodes
    bulk: float = 3.0  # transfer of 256 KB over that socket
    lost_after: float = 10.0  # silence after which a node agent counts as lost
    settle: float = 1.5  # after the first rank failed, for other failures to be reported
    phase: float = 600.0
    run: float = 3600.0


class RanksRequest(JoinRequest):
    """Join request of a node agent."""

    ranks: tuple[int, ...] = Field(min_length=1)
    node: int = Field(ge=0)
    world: int = Field(ge=1)

    @property
    def member_ids(self) -> tuple[int, ...]:
        return self.ranks


class WorkerCommand(Message):
    """A command for the worker of a rank."""

    kind: Literal["do"] = "do"
    rank: int
    id: int
    what: str
    operation: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


class Restart(Message):
    """Request to a node agent: end the workers of these ranks and start new ones."""

    kind: Literal["restart"] = "restart"
    ranks: tuple[int, ...]


class PositionQuery(Message):
    """Query the state of the workers of these ranks."""

    kind: Literal["where"] = "where"
    id: int
    ranks: tuple[int, ...]


class Positions(Message):
    """Reply to ``PositionQuery``: each worker's operation and its number, by rank."""

    kind: Literal["at"] = "at"
    ranks: dict[int, Position]


class ClockQuery(Message):
    """Query of a host's clock; the reply has ``now``."""

    kind: Literal["clock"] = "clock"
    round: int
    at: float  # by rank 0's clock
    now: float | None = None


class Reply(Message):
    """Reply of a worker as it leaves its pipe."""

    kind: Literal["done", "failed", "trace"]
    id: int | None = None  # of the command; a trace has none
    reply: Any = None
    error: str = ""
    record: dict[str, Any] | None = None


class WorkerReply(Message):
    """Reply of a rank's worker."""

    kind: Literal["from"] = "from"
    rank: int
    reply: Reply


class WorkerEnded(Message):
    """Notification that the worker of a rank has ended by itself."""

    kind: Literal["ended"] = "ended"
    rank: int
    reason: str
    at: Position


class End(Message):
    """End of the run: measurements and exit status, or the failure."""

    kind: Literal["end"] = "end"
    measurements: dict[str, Any] | None = None
    status: int | None = None
    error: str | None = None
    advice: str = ""


RunMessage = (
    Beat | WorkerCommand | Restart | PositionQuery | Positions | ClockQuery | WorkerReply | WorkerEnded | End
)
MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[RunMessage, Field(discriminator="kind")])


@dataclass(frozen=True, kw_only=True)
class Event:
    """Message of a node agent, or the reason for which it was lost."""

    peer: Peer[RanksRequest]
    message: RunMessage | None = None
    lost: str | None = None


class Hub(Server[RanksRequest]):
    """Rank 0's end of the channel: admits node agents and puts their messages into one queue."""

    def __init__(self, rendezvous: Rendezvous, limits: Limits) -> None:
        self._world, self._lost_after_s = rendezvous.world, limits.lost_after
        self._refused: list[str] = []
        self.events: queue.Queue[Event] = queue.Queue()
        super().__init__(
            rendezvous.endpoint,
            RanksRequest,
            MESSAGES,
            callers=rendezvous.world,
            silence_s=limits.lost_after,
            longest=_LONGEST,
            parting_s=_PARTING_S,
            refuse=self._note_refusal,
            received=self._receive,
            lost=self._lose,
        )
        self.open()

    def refused(self) -> list[str]:
        """Reasons for which callers that know the secret were refused."""
        return list(self._refused)

    def _receive(self, peer: Peer[RanksRequest], message: RunMessage) -> None:
        if isinstance(message, WorkerReply | WorkerEnded) and message.rank not in peer.request.ranks:
            raise BadMessage(f"a message of rank {message.rank}, which it has not")
        self.events.put(Event(peer=peer, message=message))

    def _lose(self, peer: Peer[RanksRequest], error: Exception) -> None:
        reason = describe_loss(
            error,
            self._lost_after_s,
            sender="its node agent",
            broken="its control connection broke (its node agent was killed, or the host went away)",
        )
        self.events.put(Event(peer=peer, lost=reason))

    def _note_refusal(self, request: RanksRequest) -> str | None:
        reason = self._refusal(request)
        if reason is not None:
            self._refused.append(reason)
        return reason

    def _refusal(self, request: RanksRequest) -> str | None:
        host, world = request.host, self._world
        if request.world != world:
            return f"{host} expects {request.world} ranks, rank 0 {world}"
        if not all(0 <= rank < world for rank in request.ranks):
            return f"{host} claims rank {max(request.ranks)} of {world}"
        peers = self.peers()
        duplicate = sorted(set(request.ranks) & set(peers))
        if duplicate:
            return f"{host} claims rank {duplicate[0]}, and so does {peers[duplicate[0]].request.host}"
        return None


def join(rendezvous: Rendezvous, limits: Limits) -> Connection[RunMessage]:
    """Connect a node agent to rank 0's hub. Raises UserError if it is unreachable or refuses."""
    request = RanksRequest(
        ranks=rendezvous.ranks, node=rendezvous.node, world=rendezvous.world, host=socket.gethostname()
    )
    try:
        return connect(
            rendezvous.endpoint,
            request,
            MESSAGES,
            limit_s=limits.rendezvous,
            silence_s=limits.lost_after,
            longest=_LONGEST,
        )
    except Refused as error:
        raise UserError(
            f"Rank 0 rejected rank {rendezvous.ranks[0]}: {error}.",
            "Check how the processes were started: two runs may use the same job and ports.",
        ) from None
    except Unreachable as error:
        raise UserError(
            f"Rank 0's control channel at {rendezvous.host}, ports {rendezvous.ports[0]} to "
            f"{rendezvous.ports[-1]}, could not be reached within {limits.rendezvous:g} s ({error}).",
            _why_unreachable(rendezvous, limits.connect),
        ) from None


def _why_unreachable(rendezvous: Rendezvous, limit_s: float) -> str:
    """Return what to do, depending on whether the host responds at all: a refusal is a response, too."""
    control = [_answers(rendezvous.host, port, limit_s) for port in rendezvous.ports[:_KNOCKS]]
    if any(control):
        return (
            "The host responds, but no process of this run listens there. Check that rank 0 runs, that no "
            "firewall refuses these ports, and that CHECKLIST_SECRET is the same on all ranks."
        )
    other_ports = (
        rendezvous.ports[0] - PORT_OFFSET,
        rendezvous.ports[-1] + 1,
        _SSH,
    )  # the first a launcher's own
    elsewhere = next((port for port in other_ports if _answers(rendezvous.host, port, limit_s)), None)
    if elsewhere is not None:
        return (
            f"The host answers on port {elsewhere}, so a firewall drops these: open them, or give others by "
            "CHECKLIST_PORT."
        )
    return (
        "Nothing at that host answers: is it up, does its name resolve here, and are these ports open "
        "(CHECKLIST_PORT takes others)?"
    )


def _answers(host: str, port: int, limit_s: float) -> bool:
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
