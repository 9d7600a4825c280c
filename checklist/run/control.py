"""The control channel: who is where in which operation. It is not the collectives' own network path.

Plain TCP with one JSON object a line, so that it still works when a collective hangs. Rank 0's supervisor
listens (:class:`Hub`), every supervisor connects (:class:`Link`), rank 0's too::

    supervisor -> hub   hello {token, ranks, node, world, host}
    hub -> supervisor   welcome | refused {why}
    hub -> supervisor   do {rank, id, what, arguments} | restart {ranks} | clock {at} | trace {ranks}
                        | end {measurements, status} | end {error, advice} | beat
    supervisor -> hub   from {rank, message}              what a worker has said
                        ended {rank, why}                 a worker has ended by itself
                        clock {at, now} | beat {ranks: {rank: [operation, sequence, state]}}
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from checklist.run.rendezvous import Rendezvous
from estimator.errors import UserError

Message = dict[str, Any]
HANDSHAKE_S = 5.0
BEAT_S = 0.5
_PARTING_S = 5.0  # for supervisors to read their last message, over a slow link too
_LONGEST_LINE = 64 << 20  # a run of a thousand nodes ends with its measurements in one line


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


class Line:
    """One connection: JSON lines both ways. A peer that is silent for as long as ``patience`` is lost."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """False when the peer can't be reached; whoever reads from it finds out too."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> Message:
        """The next message. OSError (TimeoutError when silent) or ValueError when the peer is lost."""
        while (end := self._buffer.find(b"\n")) < 0:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("connection closed")
            self._buffer += data
            if len(self._buffer) > _LONGEST_LINE:
                raise ValueError("not a control channel")
        message = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        if not isinstance(message, dict):
            raise ValueError("not a control channel")
        return message

    def patience(self, seconds: float) -> None:
        """How long the peer may be silent from now on."""
        self._socket.settimeout(seconds)

    @property
    def own_address(self) -> str:
        """This host's address on the way to the peer."""
        return str(self._socket.getsockname()[0])

    def last_word(self) -> None:
        """Nothing more is sent; the peer reads what was, and then sees the end.

        To close at once, with something of the peer's unread, would reset the connection and lose it.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Also wakes whoever reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A supervisor as the hub knows it."""

    ranks: tuple[int, ...]
    node: int
    host: str
    line: Line = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a supervisor has said, or its end (``lost``: why)."""

    peer: Peer
    message: Message | None = None
    lost: str | None = None


class Hub:
    """Rank 0's end: takes supervisors in and puts what they say into one queue."""

    def __init__(self, rendezvous: Rendezvous, limits: Limits) -> None:
        self._rendezvous, self._limits = rendezvous, limits
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}  # by rank
        self._refused: list[str] = []
        self._closed = False
        self.events: queue.Queue[Event] = queue.Queue()
        self._listener = _listen(rendezvous.ports)
        threading.Thread(target=self._accept, name="checklist-accept", daemon=True).start()
        threading.Thread(target=self._beat, name="checklist-beat", daemon=True).start()

    def peers(self) -> dict[int, Peer]:
        """Who is there now, by rank."""
        with self._lock:
            return dict(self._peers)

    def refused(self) -> list[str]:
        """Why others were not taken in."""
        with self._lock:
            return list(self._refused)

    def tell_all(self, message: Message) -> None:
        """To every supervisor, once; to rank 0's own last, as it closes this hub when it hears of the end."""
        peers = {id(peer): peer for peer in self.peers().values()}.values()
        for peer in sorted(peers, key=lambda peer: 0 in peer.ranks):
            peer.line.send(message)

    def close(self) -> None:
        """Ends every connection, but lets the supervisors first read what is still on its way to them."""
        with self._lock:
            self._closed = True
        self._listener.close()
        for peer in self.peers().values():
            peer.line.last_word()
        deadline = time.monotonic() + _PARTING_S
        while self.peers() and time.monotonic() < deadline:
            time.sleep(0.01)
        for peer in self.peers().values():
            peer.line.close()

    def _beat(self) -> None:
        while not self._closed:
            self.tell_all({"kind": "beat"})
            time.sleep(1.0)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="checklist-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection, HANDSHAKE_S)
        try:
            peer = self._greet(line)
        except (OSError, ValueError, KeyError, TypeError):  # a port scanner, or a supervisor that has gone
            peer = None
        if peer is None:
            line.close()
            return
        line.patience(self._limits.lost_after)
        try:
            while True:
                self.events.put(Event(peer=peer, message=line.receive()))
        except (OSError, ValueError) as error:
            with self._lock:
                for rank in peer.ranks:
                    self._peers.pop(rank, None)
                closed = self._closed
            if not closed:
                self.events.put(Event(peer=peer, lost=_why_lost(error, self._limits.lost_after)))
        line.close()

    def _greet(self, line: Line) -> Peer | None:
        hello = line.receive()
        ranks = tuple(int(rank) for rank in hello["ranks"])
        peer = Peer(ranks=ranks, node=int(hello["node"]), host=str(hello["host"]), line=line)
        with self._lock:
            why = self._objection(hello, peer)
            if why is None:
                line.send({"kind": "welcome"})  # before anybody else can say something to it
                self._peers.update(dict.fromkeys(ranks, peer))
            elif why != "token":
                self._refused.append(why)
        if why is not None:
            line.send({"kind": "refused", "why": why})
            return None
        return peer

    def _objection(self, hello: Message, peer: Peer) -> str | None:
        if not secrets.compare_digest(str(hello["token"]), self._rendezvous.token):
            return "token"
        if int(hello["world"]) != self._rendezvous.world:
            return (
                f"{peer.host} thinks that there are {hello['world']} ranks, rank 0 {self._rendezvous.world}"
            )
        taken = sorted(set(peer.ranks) & set(self._peers))
        if taken:
            return f"{peer.host} says that it has rank {taken[0]}, and so does {self._peers[taken[0]].host}"
        return None


class Link:
    """A supervisor's end."""

    def __init__(self, line: Line) -> None:
        self.line = line

    @classmethod
    def connect(cls, rendezvous: Rendezvous, limits: Limits) -> Link:
        """Find rank 0's hub. Raises UserError when it can't be reached, or says no."""
        deadline = time.monotonic() + limits.rendezvous
        problem = "nobody answered"
        while time.monotonic() < deadline:
            for port in rendezvous.ports:
                try:
                    connection = socket.create_connection((rendezvous.host, port), timeout=HANDSHAKE_S)
                except OSError as error:
                    problem = error.strerror or str(error)
                    if isinstance(error, TimeoutError):
                        break  # other ports of a host that doesn't answer won't either
                    continue
                line = Line(connection, HANDSHAKE_S)
                try:
                    line.send(_hello(rendezvous))
                    answer = line.receive()
                except (OSError, ValueError):
                    line.close()
                    continue
                if answer.get("kind") == "welcome":
                    line.patience(limits.lost_after)
                    return cls(line)
                line.close()
                if answer.get("why") != "token":
                    raise UserError(
                        f"Rank 0 does not take rank {rendezvous.ranks[0]} in: {answer.get('why')}.",
                        "Two runs think that they are one job: look at how the processes were started.",
                    )
            time.sleep(0.2)
        raise UserError(
            f"Rank 0's control channel at {rendezvous.host}, ports {rendezvous.ports[0]} to "
            f"{rendezvous.ports[-1]}, could not be reached within {limits.rendezvous:g} s: {problem}.",
            "Is rank 0 running, does its name resolve here, and are all ports open between the nodes?",
        )


def _hello(rendezvous: Rendezvous) -> Message:
    return {
        "kind": "hello",
        "token": rendezvous.token,
        "ranks": list(rendezvous.ranks),
        "node": rendezvous.node,
        "world": rendezvous.world,
        "host": socket.gethostname(),
    }


def _why_lost(error: Exception, patience_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"its supervisor has said nothing for {patience_s:g} s"
    return "its control connection broke (its supervisor was killed, or the host went away)"


def _listen(ports: tuple[int, ...]) -> socket.socket:
    problem = ""
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=1024)
        except OSError as error:  # noqa: PERF203 - the next port may be free
            problem = error.strerror or str(error)
    raise UserError(
        f"Rank 0 can't listen on any port from {ports[0]} to {ports[-1]}: {problem}.",
        "End what holds them, or set another MASTER_PORT.",
    )
