"""Rendezvous of the processes of one run: one of them is the server, all others connect to it.

The channel (launchers.cluster.channel) carries the messages. The gang (launchers.gang.control), a scheduler's
nodes (launchers.scheduler.rendezvous) and the checklist (checklist.run.control) each define their messages,
join request, admission rule and error messages; connections, heartbeats, losses and goodbyes are handled
here.

=========================  =============================================================================
event                      result
=========================  =============================================================================
invalid join request       refused with the reason that ``refuse`` returns; the caller raises Refused
late caller                admitted if ``refuse`` permits, until :meth:`Server.stop_admitting`
silent or broken peer      ``lost`` is called with the error, and the peer may join again
invalid message            the same, with BadMessage; other peers are not affected
goodbye                    the peer may join again; ``lost`` is not called
close during admission     the caller is refused
=========================  =============================================================================
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from launchers.cluster.channel import MAX_MESSAGE_BYTES, Connection, Heartbeat
from launchers.cluster.endpoint import Endpoint
from launchers.cluster.greeting import BadMessage, Message
from launchers.cluster.listener import Caller, Listener


class Beat(Message):
    """Heartbeat; a longer silence than the connection's limit counts as a loss."""

    kind: Literal["beat"] = "beat"


class Goodbye(Message):
    """Announcement that the sender leaves intentionally: its closed connection does not count as a loss."""

    kind: Literal["goodbye"] = "goodbye"


class JoinRequest(Message):
    """Identification of a caller."""

    host: str

    @property
    @abstractmethod
    def member_ids(self) -> tuple[int, ...]:
        """Ranks or nodes that the caller is responsible for."""


class NodeRequest(JoinRequest):
    """Join request of a node."""

    node: int = Field(ge=0)
    nodes: int = Field(ge=1)

    @property
    def member_ids(self) -> tuple[int, ...]:
        return (self.node,)


Request = TypeVar("Request", bound=JoinRequest)


@dataclass(frozen=True, kw_only=True)
class Peer(Generic[Request]):
    """Admitted caller, as the server sees it."""

    request: Request
    address: str
    """Address from which it connected."""
    connection: Connection[Any] = field(repr=False)


class Server(Generic[Request]):
    """Server of a rendezvous: admits callers and receives from each in a separate thread.

    Parameters
    ----------
    silence_s:
        Seconds without a message after which a peer counts as lost.
    parting_s:
        Seconds that peers have to read their last messages and leave when the server closes.
    refuse:
        Returns the reason to refuse a caller, or None to admit it. Called with the lock held, like
        ``joined``: neither may wait for a thread that uses this server.
    joined:
        Called with a new peer before any of its messages.
    received:
        Called with each message except heartbeats, in the peer's thread. A ValueError ends the connection.
    lost:
        Called with the error that ended a connection, unless the peer said goodbye or the server is closed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: type[Request],
        messages: TypeAdapter[Any],
        *,
        callers: int,
        silence_s: float,
        longest: int = MAX_MESSAGE_BYTES,
        parting_s: float = 0.0,
        refuse: Callable[[Request], str | None],
        joined: Callable[[Peer[Request]], None] = lambda _: None,
        received: Callable[[Peer[Request], Any], None],
        lost: Callable[[Peer[Request], Exception], None],
    ) -> None:
        self._endpoint, self._requests, self._messages = endpoint, requests, messages
        self._callers, self._silence_s, self._longest = callers, silence_s, longest
        self._parting_s = parting_s
        self._refuse, self._on_join, self._on_message, self._on_loss = refuse, joined, received, lost
        self._lock = threading.RLock()
        self._peers: dict[int, Peer[Request]] = {}
        self._joined: dict[int, Peer[Request]] = {}
        self._closed = False
        self._listener: Listener[Request] | None = None
        self._heartbeat: Heartbeat | None = None

    def open(self) -> None:
        """Admit callers and send heartbeats. Raises UserError if none of the ports is free."""
        self._listener = Listener(self._endpoint, self._requests, self._serve, callers=self._callers)
        self._heartbeat = Heartbeat(lambda: self.send(Beat()))

    def peers(self) -> dict[int, Peer[Request]]:
        """Connected peers, by rank or node."""
        with self._lock:
            return dict(self._peers)

    def joined(self) -> dict[int, Peer[Request]]:
        """All peers ever admitted, by rank or node, including those lost since."""
        with self._lock:
            return dict(self._joined)

    def send(self, message: BaseModel) -> None:
        """Send a message to every peer once; last to rank or node 0, which may close this server then."""
        for peer in self._distinct():
            peer.connection.send(message)

    def stop_admitting(self) -> None:
        """Refuse further callers and free the port; peers stay connected."""
        if self._listener is not None:
            self._listener.close()

    def close(self, last: BaseModel | None = None) -> None:
        """Send a last message, wait for peers to leave, and end all connections."""
        with self._lock:
            self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self.stop_admitting()
        if last is not None:
            self.send(last)
        peers = self._distinct()
        for peer in peers:
            peer.connection.finish()
        deadline = time.monotonic() + self._parting_s
        while self.peers() and time.monotonic() < deadline:
            time.sleep(0.01)
        for peer in peers:
            peer.connection.close()

    def _distinct(self) -> list[Peer[Request]]:
        peers = {id(peer): peer for peer in self.peers().values()}
        return sorted(peers.values(), key=lambda peer: 0 in peer.request.member_ids)

    def _serve(self, caller: Caller[Request]) -> None:
        peer = self._admit(caller)
        if peer is None:
            return
        error = receive_all(peer.connection, lambda message: self._on_message(peer, message))
        with self._lock:
            for member in peer.request.member_ids:
                self._peers.pop(member, None)
            closed = self._closed
        if error is not None and not closed:
            self._on_loss(peer, error)
        peer.connection.close()

    def _admit(self, caller: Caller[Request]) -> Peer[Request] | None:
        request = caller.request
        with self._lock:
            reason = "the rendezvous has ended" if self._closed else self._refuse(request)
            if reason is not None:
                caller.refuse(reason)
                return None
            try:
                connection = caller.accept(self._messages, silence_s=self._silence_s, longest=self._longest)
            except OSError:  # the caller has disconnected, and tries again
                return None
            peer = Peer(request=request, address=caller.address, connection=connection)
            self._peers.update(dict.fromkeys(request.member_ids, peer))
            self._joined.update(dict.fromkeys(request.member_ids, peer))
            self._on_join(peer)
        return peer


class Client:
    """A caller's end of a rendezvous, on a connection from :func:`launchers.cluster.channel.connect`.

    Sends heartbeats, and receives in a thread: ``received`` is called with each message, ``ended`` with the
    error that ended the connection, or with None after the server's goodbye.
    """

    def __init__(
        self,
        connection: Connection[Any],
        *,
        received: Callable[[Any], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._connection = connection
        self._heartbeat = Heartbeat(lambda: self.send(Beat()))
        threading.Thread(
            target=lambda: ended(receive_all(connection, received)), name="rendezvous-client", daemon=True
        ).start()

    def send(self, message: BaseModel) -> None:
        """Send a message; if that fails, ``ended`` is called."""
        self._connection.send(message)

    def close(self, last: BaseModel | None = None) -> None:
        """Send a last message, and end the connection."""
        self._heartbeat.stop()
        if last is not None:
            self.send(last)
        self._connection.close()


def receive_all(connection: Connection[Any], received: Callable[[Any], None]) -> Exception | None:
    """Pass each message except heartbeats to ``received``, until the peer says goodbye or is lost.

    Returns the error that ended the connection; None after a goodbye.
    """
    try:
        while not isinstance(message := connection.receive(), Goodbye):
            if not isinstance(message, Beat):
                received(message)
    except (OSError, ValueError) as error:
        return error
    return None


def describe_loss(error: Exception, silence_s: float, *, sender: str, broken: str) -> str:
    """Reason for which a peer counts as lost, as a clause; ``broken`` if its connection has closed."""
    if isinstance(error, TimeoutError):
        return f"{sender} has sent nothing for {silence_s:g} s"
    if isinstance(error, BadMessage):
        return f"{sender} sent an invalid message: {error}"
    return broken
