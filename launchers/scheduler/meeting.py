"""Where the nodes of a job meet before they train: each says what it has, node 0 says what is to be done.

Over a channel of their own (launchers.cluster.channel). Both ends are used alike: what one sends the other
receives; what has failed on one node is raised on all.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from estimator.errors import UserError
from launchers.cluster.allocation import Allocation
from launchers.cluster.channel import Connection, Heartbeat, Unreachable, connect
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.cluster.greeting import Message, Refused
from launchers.cluster.listener import Guest, Listener
from launchers.cluster.processes import lost_parent
from launchers.gang.control import Beat, lost, why_lost
from launchers.gang.failures import Failure, GangFailed

COME_S = 300.0  # for all nodes to be there
LOST_AFTER_S = 60.0  # of silence; node 0 may be busy with tokenising


Values = dict[str, Any]


class Claim(Message):
    """Which node a caller is."""

    node: int = Field(ge=0)
    nodes: int = Field(ge=1)
    host: str


class Said(Message):
    """Values that one end exchanges with the other."""

    kind: Literal["said"] = "said"
    values: Values


class Mistake(Message):
    """A user's mistake that one node has found, which ends the run on all."""

    kind: Literal["mistake"] = "mistake"
    problem: str
    advice: str


class Lost(Message):
    """A node that the others can't go on without."""

    kind: Literal["lost"] = "lost"
    failure: Failure


MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[Beat | Said | Mistake | Lost, Field(discriminator="kind")])


class Peer:
    """The other end of one connection, received from by a thread of its own."""

    def __init__(self, connection: Connection[Any], node: int, host: str) -> None:
        self.node, self.host = node, host
        self._connection = connection
        self._received: queue.Queue[Said | Mistake | Lost | Exception] = queue.Queue()
        self._parent = os.getppid()
        self._heartbeat = Heartbeat(lambda: self._send(Beat()))
        threading.Thread(target=self._listen, name="meeting", daemon=True).start()

    def send(self, values: Values) -> None:
        """Tell the other end these values, which its :meth:`receive` returns."""
        self._send(Said(values=values))

    def fail(self, error: UserError | GangFailed) -> None:
        """Tell the other end what has failed, which it raises too."""
        if isinstance(error, GangFailed):
            self._send(Lost(failure=error.failure))
        else:
            self._send(Mistake(problem=error.problem, advice=error.advice))

    def receive(self, limit_s: float) -> Values:
        """What the other end says next. Raises what has failed there, NodeLost when it is gone or silent."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                message = self._received.get(timeout=0.5)
            except queue.Empty:
                if lost_parent(self._parent):
                    raise SystemExit("the end of the process that had started it") from None
                if time.monotonic() > deadline:
                    raise lost(
                        self.node, self.host, f"it did not answer within {limit_s:g} s"
                    ).error() from None
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Mistake):
                raise ElsewhereError(message.problem, message.advice)
            if isinstance(message, Lost):
                raise message.failure.error()
            return message.values

    def close(self) -> None:
        """End the connection."""
        self._heartbeat.stop()
        self._connection.close()

    def _send(self, message: Beat | Said | Mistake | Lost) -> None:
        self._connection.send(message)  # where that fails, the listening thread finds out too

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if not isinstance(message, Beat):
                    self._received.put(message)
        except (OSError, ValueError) as error:
            self._received.put(lost(self.node, self.host, why_lost(error, LOST_AFTER_S)).error())


class SecretFile:
    """The secret of a meeting, as a file of node 0's in the folder that all nodes share.

    Other users can't read it, as far as the file system keeps permissions.
    """

    def __init__(self, folder: Path, place: Allocation) -> None:
        name = re.sub(r"[^\w.-]", "_", f"meeting-{place.job}.{place.attempt}")
        self.path = folder / name

    def write(self) -> Secret:
        """Write a new secret, readable by this user alone; node 0 does so."""
        secret = Secret.make()
        new = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.text)
        new.replace(self.path)
        return secret

    def read(self) -> Secret | None:
        """What node 0 has made; None where it is not to be seen yet. UserError where it is another user's."""
        with contextlib.suppress(OSError):
            list(self.path.parent.iterdir())  # makes NFS look anew
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._suspect(error.strerror or str(error)) from None
        with os.fdopen(descriptor) as file:
            owner = os.fstat(descriptor).st_uid
            # Of this user, or of whom a file server makes of it, as of the folder
            if owner not in (os.getuid(), self.path.parent.stat().st_uid):
                raise self._suspect(f"it belongs to user {owner}")
            return Secret(file.read(256)) or None

    def wait(self, limit_s: float) -> Secret:
        """:meth:`read`, once it is there. UserError where it is not to be seen within the limit."""
        deadline = time.monotonic() + limit_s
        parent = os.getppid()
        while (secret := self.read()) is None:
            if lost_parent(parent):
                raise SystemExit("the end of the process that had started it")
            if time.monotonic() > deadline:
                raise UserError(
                    f"{socket.gethostname()} does not see {self.path}, which node 0 of the job has.",
                    "Give --output on a file system that all nodes share; node 0's log says whether it ran.",
                )
            time.sleep(0.5)
        return secret

    def remove(self) -> None:
        """Remove the secret's file, once the meeting is over."""
        self.path.unlink(missing_ok=True)

    def _suspect(self, why: str) -> UserError:
        return UserError(f"{self.path} can't be used: {why}.", "Remove it, or give another --output.")


@contextlib.contextmanager
def meet(place: Allocation, folder: Path, come_s: float = COME_S) -> Iterator[Meeting]:
    """The meeting of a job's nodes; ``folder`` is one that all of them see.

    Raises UserError where this node does not see what node 0 has put there, NodeLost as :class:`Meeting`.
    """
    if place.nodes == 1:
        with Meeting(place.address(Secret(""), "meeting")) as meeting:
            yield meeting
        return
    file = SecretFile(folder, place)
    if place.node > 0:
        with Meeting(place.address(file.wait(come_s), "meeting"), come_s, file.read) as meeting:
            yield meeting
        return
    try:
        with Meeting(place.address(file.write(), "meeting"), come_s) as meeting:
            yield meeting
    finally:
        file.remove()


class ElsewhereError(UserError):
    """A user's mistake that another node has found, and shows."""


class Meeting:
    """The nodes of one job. On node 0 all others are peers; on the others node 0 is the only one.

    Raises NodeLost where not all nodes are there within ``come_s``. With one node there is nobody to meet.
    ``renew`` gives the secret anew, which an earlier start of the job may have left.
    """

    def __init__(
        self, address: NodeAddress, come_s: float = COME_S, renew: Callable[[], Secret | None] = lambda: None
    ) -> None:
        self._address = address
        self._peers: dict[int, Peer] = {}
        if address.nodes == 1:
            return
        if address.node == 0:
            self._peers = _come_in(address, come_s)
        else:
            self._peers = {0: Peer(_call(address, come_s, renew), 0, address.main_host)}

    def gather(self, own: Values, limit_s: float) -> list[Values]:
        """On node 0: what each node says, by node; ``own`` is node 0's."""
        deadline = time.monotonic() + limit_s
        others = [peer for _, peer in sorted(self._peers.items())]
        return [own, *(peer.receive(max(1.0, deadline - time.monotonic())) for peer in others)]

    def send(self, values: Values) -> None:
        """From node 0 to all; from another to node 0."""
        for peer in self._peers.values():
            peer.send(values)

    def receive(self, limit_s: float) -> Values:
        """On other nodes: what node 0 says next."""
        return self._peers[0].receive(limit_s)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _part(self._peers, error)


def _part(peers: dict[int, Peer], error: BaseException | None) -> None:
    """End the lines; those at the other ends hear why, if something has failed."""
    for peer in peers.values():
        if isinstance(error, (UserError, GangFailed)):
            peer.fail(error)
        peer.close()


def _come_in(address: NodeAddress, limit_s: float) -> dict[int, Peer]:
    """Node 0: accept every other node of the job, and return the connections by node."""
    peers: dict[int, Peer] = {}
    try:
        _take_in(address, limit_s, peers)
    except BaseException as error:
        _part(peers, error)
        raise
    return peers


def _take_in(address: NodeAddress, limit_s: float, peers: dict[int, Peer]) -> None:
    deadline = time.monotonic() + limit_s
    parent = os.getppid()
    came: queue.Queue[Peer] = queue.Queue()
    taken: set[int] = set()
    lock = threading.Lock()

    def welcome(guest: Guest[Claim]) -> None:
        claim = guest.claim
        with lock:
            if not 0 < claim.node < address.nodes == claim.nodes or claim.node in taken:
                guest.refuse(f"node {claim.node} of {claim.nodes} is not expected (any more)")
                return
            try:
                connection = guest.accept(MESSAGES, silence_s=LOST_AFTER_S)
            except OSError:  # it has gone, and tries again
                return
            taken.add(claim.node)
        came.put(Peer(connection, claim.node, claim.host))

    with contextlib.closing(Listener(address.endpoint, Claim, welcome, callers=address.nodes)):
        while len(peers) < address.nodes - 1:
            if lost_parent(parent):
                raise SystemExit("the end of the process that had started it")
            if time.monotonic() > deadline:
                raise _missing(address, peers, limit_s)
            with contextlib.suppress(queue.Empty):
                peer = came.get(timeout=0.5)
                peers[peer.node] = peer


def _call(address: NodeAddress, limit_s: float, renew: Callable[[], Secret | None]) -> Connection[Any]:
    """Find node 0. Raises NodeLost where it can't be reached, UserError where it refuses this node."""
    claim = Claim(node=address.node, nodes=address.nodes, host=socket.gethostname())
    try:
        return connect(
            address.endpoint, claim, MESSAGES, limit_s=limit_s, silence_s=LOST_AFTER_S, renew=renew
        )
    except Refused as error:
        raise UserError(f"Node 0 refused this node: {error}.") from None
    except Unreachable as error:
        why = f"it could not be reached within {limit_s:g} s ({error})"
        raise lost(0, address.main_host, why).error() from None


def _missing(address: NodeAddress, peers: dict[int, Peer], limit_s: float) -> GangFailed:
    missing = sorted(set(range(1, address.nodes)) - set(peers))
    return GangFailed(
        Failure(
            kind="node",
            node=missing[0],
            host="?",
            at=time.time(),
            message=f"node {', '.join(map(str, missing))} did not come within {limit_s:g} s "
            f"({len(peers) + 1} of {address.nodes} were there)",
        )
    )
