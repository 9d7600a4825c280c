"""Where the nodes of a job meet before they train: each says what it has, node 0 says what is to be done.

Over a channel of their own (launchers.cluster.rendezvous). Both ends are used alike: what one sends the other
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
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.cluster.greeting import Message
from launchers.cluster.processes import lost_parent
from launchers.cluster.rendezvous import Beat, Client, NodeRequest, Peer, Server
from launchers.gang.control import absent, call_node_0, lost, unexpected, why_lost
from launchers.gang.failures import Failure, GangFailed

COME_S = 300.0  # for all nodes to be there
LOST_AFTER_S = 60.0  # of silence; node 0 may be busy with tokenising


Values = dict[str, Any]


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


class _Inbox:
    """Messages of one node that wait to be read."""

    def __init__(self, node: int, host: str) -> None:
        self._node, self._host = node, host
        self._received: queue.Queue[Said | Mistake | Lost | Exception] = queue.Queue()
        self._parent = os.getppid()
        self.put = self._received.put

    def lose(self, error: Exception | None) -> None:
        """End the messages with the loss of the node."""
        why = why_lost(error or ConnectionError(), LOST_AFTER_S)
        self._received.put(lost(self._node, self._host, why).error())

    def receive(self, limit_s: float) -> Values:
        """Return the next values. Raises what has failed on that node, NodeLost if it is gone or silent."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                message = self._received.get(timeout=0.5)
            except queue.Empty:
                _exit_with_parent(self._parent)
                if time.monotonic() > deadline:
                    why = f"it did not answer within {limit_s:g} s"
                    raise lost(self._node, self._host, why).error() from None
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Mistake):
                raise ElsewhereError(message.problem, message.advice)
            if isinstance(message, Lost):
                raise message.failure.error()
            return message.values


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
            _exit_with_parent(parent)
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
        self._inboxes: dict[int, _Inbox] = {}
        self._link: Server[NodeRequest] | Client
        if address.node == 0:
            self._link = self._lead(address, come_s)
        else:
            inbox = self._inboxes[0] = _Inbox(0, address.main_host)
            request = NodeRequest(node=address.node, nodes=address.nodes, host=socket.gethostname())
            connection = call_node_0(
                address, request, MESSAGES, limit_s=come_s, silence_s=LOST_AFTER_S, renew=renew
            )
            self._link = Client(connection, received=inbox.put, ended=inbox.lose)

    def gather(self, own: Values, limit_s: float) -> list[Values]:
        """On node 0: what each node says, by node; ``own`` is node 0's."""
        deadline = time.monotonic() + limit_s
        inboxes = [inbox for _, inbox in sorted(self._inboxes.items())]
        return [own, *(inbox.receive(max(1.0, deadline - time.monotonic())) for inbox in inboxes)]

    def send(self, values: Values) -> None:
        """From node 0 to all; from another to node 0."""
        self._link.send(Said(values=values))

    def receive(self, limit_s: float) -> Values:
        """On other nodes: what node 0 says next."""
        return self._inboxes[0].receive(limit_s)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close(_reason(error))

    def _lead(self, address: NodeAddress, limit_s: float) -> Server[NodeRequest]:
        """Admit all other nodes. Raises NodeLost if not all join in time; those that did are notified."""
        all_joined = threading.Event()

        def refuse(request: NodeRequest) -> str | None:
            expected = 0 < request.node < address.nodes == request.nodes and request.node not in self._inboxes
            return None if expected else unexpected(request)

        def join(peer: Peer[NodeRequest]) -> None:
            self._inboxes[peer.request.node] = _Inbox(peer.request.node, peer.request.host)
            if len(self._inboxes) == address.nodes - 1:
                all_joined.set()

        server = Server(
            address.endpoint,
            NodeRequest,
            MESSAGES,
            callers=address.nodes,
            silence_s=LOST_AFTER_S,
            refuse=refuse,
            joined=join,
            received=lambda peer, message: self._inboxes[peer.request.node].put(message),
            lost=lambda peer, error: self._inboxes[peer.request.node].lose(error),
        )
        if address.nodes == 1:
            return server
        deadline, parent = time.monotonic() + limit_s, os.getppid()
        try:
            server.open()
            while not all_joined.wait(0.5):
                _exit_with_parent(parent)
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, address.nodes)) - set(self._inboxes))
                    joined = address.nodes - len(missing)
                    raise absent(missing, limit_s, joined=joined, of=address.nodes).error()
        except BaseException as error:
            server.close(_reason(error))
            raise
        server.stop_admitting()
        return server


def _reason(error: BaseException | None) -> Mistake | Lost | None:
    """Message that makes the other nodes raise this error, too."""
    if isinstance(error, GangFailed):
        return Lost(failure=error.failure)
    return Mistake(problem=error.problem, advice=error.advice) if isinstance(error, UserError) else None


def _exit_with_parent(parent: int) -> None:
    if lost_parent(parent):
        raise SystemExit("the end of the process that had started it")
