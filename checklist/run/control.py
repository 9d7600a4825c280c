"""What supervisors and rank 0 tell each other: who is where in which operation, what was measured.

Over a channel (launchers.cluster.channel) that is not the collectives' own network path, so that it still
works when a collective hangs. Rank 0's supervisor listens (:class:`Hub`), every supervisor calls
(:func:`join`), rank 0's too, and claims its ranks::

    hub -> supervisor   do {rank, id, what, arguments} | restart {ranks} | where {id, ranks} | clock {at}
                        | end {measurements, status} | end {error, advice} | beat
    supervisor -> hub   from {rank, reply}                what a worker has answered
                        ended {rank, why}                 a worker has ended by itself
                        at {ranks: {rank: [operation, sequence, state]}} | clock {at, now} | beat

Two that claim the same rank at the same time are told of each other. A supervisor that was cut off may come
again: its ranks are free as soon as rank 0 has seen the end of its connection.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from checklist.run.rendezvous import PORT_OFFSET, Rendezvous
from estimator.errors import UserError
from launchers.cluster.channel import Connection, Heartbeat, Unreachable, connect
from launchers.cluster.greeting import BadMessage, Message, Refused
from launchers.cluster.listener import Guest, Listener

BEAT_S = 0.5
_PARTING_S = 5.0  # for supervisors to read their last message, over a slow link too
_KNOCKS = 2  # ports that are asked once more, when there was no way to rank 0
_SSH = 22
_LONGEST = 64 << 20  # a run of a thousand nodes ends with its measurements in one message

Position = tuple[str, int, str]  # operation, sequence, and the process's state as the kernel gives it


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of every wait, in seconds."""

    rendezvous: float = 60.0  # until all ranks are there
    operation: float = 30.0  # one collective, or one other thing that a worker is asked to do
    connect: float = 2.0  # a socket between two nodes
    bulk: float = 3.0  # 256 KB over it
    lost_after: float = 10.0  # silence of a supervisor
    settle: float = 1.5  # after the first rank has failed, for the others to say so too
    phase: float = 600.0
    run: float = 3600.0


class Claim(Message):
    """Which ranks a caller looks after."""

    ranks: tuple[int, ...] = Field(min_length=1)
    node: int = Field(ge=0)
    world: int = Field(ge=1)
    host: str


class Beat(Message):
    """A supervisor's sign of life; silence for ``Limits.lost_after`` counts as its loss."""

    kind: Literal["beat"] = "beat"


class Do(Message):
    """A command for the worker of a rank."""

    kind: Literal["do"] = "do"
    rank: int
    id: int
    what: str
    operation: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


class Restart(Message):
    """Rank 0 to a supervisor: end those ranks' workers and start new ones."""

    kind: Literal["restart"] = "restart"
    ranks: tuple[int, ...]


class Where(Message):
    """Asks what the workers of those ranks do."""

    kind: Literal["where"] = "where"
    id: int
    ranks: tuple[int, ...]


class At(Message):
    """A supervisor's answer to ``Where``: each worker's operation and its number, by rank."""

    kind: Literal["at"] = "at"
    ranks: dict[int, Position]


class Clock(Message):
    """Asks a host's clock, and answers with ``now``."""

    kind: Literal["clock"] = "clock"
    round: int
    at: float  # by rank 0's clock
    now: float | None = None


class Reply(Message):
    """What a worker answers, as it leaves its pipe."""

    kind: Literal["done", "failed", "trace"]
    id: int | None = None  # of the command; a trace has none
    reply: Any = None
    error: str = ""
    record: dict[str, Any] | None = None


class FromWorker(Message):
    """What the worker of a rank has answered."""

    kind: Literal["from"] = "from"
    rank: int
    reply: Reply


class Ended(Message):
    """The worker of a rank has ended by itself."""

    kind: Literal["ended"] = "ended"
    rank: int
    why: str
    at: Position


class End(Message):
    """All is over: what was measured and the exit status, or what has failed."""

    kind: Literal["end"] = "end"
    measurements: dict[str, Any] | None = None
    status: int | None = None
    error: str | None = None
    advice: str = ""


RunMessage = Beat | Do | Restart | Where | At | Clock | FromWorker | Ended | End
MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[RunMessage, Field(discriminator="kind")])


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A supervisor as the hub knows it."""

    ranks: tuple[int, ...]
    node: int
    host: str
    address: str
    """From where it has called."""
    connection: Connection[RunMessage] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a supervisor has said, or its end (``lost``: why)."""

    peer: Peer
    message: RunMessage | None = None
    lost: str | None = None


class Hub:
    """Rank 0's end: takes supervisors in and puts what they say into one queue."""

    def __init__(self, rendezvous: Rendezvous, limits: Limits) -> None:
        self._rendezvous, self._limits = rendezvous, limits
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}  # by rank
        self._joined: dict[int, Peer] = {}  # by rank: all that have ever been there
        self._refused: list[str] = []
        self._closed = False
        self.events: queue.Queue[Event] = queue.Queue()
        self._listener = Listener(rendezvous.endpoint, Claim, self._serve, callers=rendezvous.world)
        self._heartbeat = Heartbeat(lambda: self.tell_all(Beat()))

    def peers(self) -> dict[int, Peer]:
        """Who is there now, by rank."""
        with self._lock:
            return dict(self._peers)

    def joined(self) -> dict[int, Peer]:
        """Who has ever been there, by rank: also who was lost at once."""
        with self._lock:
            return dict(self._joined)

    def refused(self) -> list[str]:
        """Why others that know the secret were not taken in."""
        with self._lock:
            return list(self._refused)

    def tell_all(self, message: RunMessage) -> None:
        """To every supervisor, once; to rank 0's own last, as it closes this hub when it hears of the end."""
        peers = {id(peer): peer for peer in self.peers().values()}.values()
        for peer in sorted(peers, key=lambda peer: 0 in peer.ranks):
            peer.connection.send(message)

    def close(self) -> None:
        """Ends every connection, but lets the supervisors first read what is still on its way to them."""
        with self._lock:
            self._closed = True
        self._heartbeat.stop()
        self._listener.close()
        for peer in self.peers().values():
            peer.connection.finish()
        deadline = time.monotonic() + _PARTING_S
        while self.peers() and time.monotonic() < deadline:
            time.sleep(0.01)
        for peer in self.peers().values():
            peer.connection.close()

    def _serve(self, guest: Guest[Claim]) -> None:
        """Hear one supervisor out, in a thread of its own."""
        peer = self._take_in(guest)
        if peer is None:
            return
        try:
            while True:
                message = peer.connection.receive()
                if isinstance(message, FromWorker | Ended) and message.rank not in peer.ranks:
                    raise BadMessage(f"a message of rank {message.rank}, which it has not")
                if not isinstance(message, Beat):
                    self.events.put(Event(peer=peer, message=message))
        except (OSError, ValueError) as error:
            with self._lock:
                for rank in peer.ranks:
                    self._peers.pop(rank, None)
                closed = self._closed
            if not closed:
                self.events.put(Event(peer=peer, lost=_why_lost(error, self._limits.lost_after)))
        peer.connection.close()

    def _take_in(self, guest: Guest[Claim]) -> Peer | None:
        claim = guest.claim
        with self._lock:
            objection = self._objection(claim)
            if objection is not None:
                self._refused.append(objection)
                guest.refuse(objection)
                return None
            try:
                connection = guest.accept(MESSAGES, silence_s=self._limits.lost_after, longest=_LONGEST)
            except OSError:  # it has gone, and tries again
                return None
            peer = Peer(
                ranks=claim.ranks,
                node=claim.node,
                host=claim.host,
                address=guest.address,
                connection=connection,
            )
            self._peers.update(dict.fromkeys(claim.ranks, peer))
            self._joined.update(dict.fromkeys(claim.ranks, peer))
        return peer

    def _objection(self, claim: Claim) -> str | None:
        if claim.world != self._rendezvous.world:
            return f"{claim.host} thinks that there are {claim.world} ranks, rank 0 {self._rendezvous.world}"
        if not all(0 <= rank < claim.world for rank in claim.ranks):
            return f"{claim.host} says that it has rank {max(claim.ranks)} of {claim.world}"
        taken = sorted(set(claim.ranks) & set(self._peers))
        if taken:
            return f"{claim.host} says that it has rank {taken[0]}, and so does {self._peers[taken[0]].host}"
        return None


def join(rendezvous: Rendezvous, limits: Limits) -> Connection[RunMessage]:
    """A supervisor's end: find rank 0's hub. Raises UserError when it can't be reached, or says no."""
    claim = Claim(
        ranks=rendezvous.ranks, node=rendezvous.node, world=rendezvous.world, host=socket.gethostname()
    )
    try:
        return connect(
            rendezvous.endpoint,
            claim,
            MESSAGES,
            limit_s=limits.rendezvous,
            silence_s=limits.lost_after,
            longest=_LONGEST,
        )
    except Refused as error:
        raise UserError(
            f"Rank 0 does not take rank {rendezvous.ranks[0]} in: {error}.",
            "Two runs think that they are one job: look at how the processes were started.",
        ) from None
    except Unreachable as error:
        raise UserError(
            f"Rank 0's control channel at {rendezvous.host}, ports {rendezvous.ports[0]} to "
            f"{rendezvous.ports[-1]}, could not be reached within {limits.rendezvous:g} s ({error}).",
            _why_unreachable(rendezvous, limits.connect),
        ) from None


def _why_unreachable(rendezvous: Rendezvous, limit_s: float) -> str:
    """What to do, by whether the host answers at all: a refusal is an answer, too."""
    control = [_answers(rendezvous.host, port, limit_s) for port in rendezvous.ports[:_KNOCKS]]
    if any(control):
        return (
            "The host answers, and nobody of this run listens there: is rank 0 running, does a firewall "
            "refuse these ports, and is CHECKLIST_SECRET the same on all?"
        )
    others = (rendezvous.ports[0] - PORT_OFFSET, rendezvous.ports[-1] + 1, _SSH)  # the first a launcher's own
    elsewhere = next((port for port in others if _answers(rendezvous.host, port, limit_s)), None)
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


def _why_lost(error: Exception, patience_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"its supervisor has said nothing for {patience_s:g} s"
    if isinstance(error, BadMessage):
        return f"what its supervisor sends is {error}"
    return "its control connection broke (its supervisor was killed, or the host went away)"
