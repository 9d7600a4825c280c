"""Rendezvous before training: every node reports its hardware, node 0 broadcasts the run configuration.

It has its own channel, by the protocol of launchers.cluster.rendezvous. What one end sends, the other
receives; an error on one node is raised on all.
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

JOIN_TIMEOUT_S = 300.0  # time limit for all nodes to join
LOST_AFTER_S = 60.0  # silence after which a node counts as lost; node 0 may be busy tokenizing


Values = dict[str, Any]


class Exchange(Message):
    """Values sent from one end to the other."""

    kind: Literal["exchange"] = "exchange"
    values: Values


class UserErrorMessage(Message):
    """User error found by one node, which ends the run on all."""

    kind: Literal["user_error"] = "user_error"
    problem: str
    advice: str


class NodeLostMessage(Message):
    """Loss of a node without which the others cannot continue."""

    kind: Literal["node_lost"] = "node_lost"
    failure: Failure


MESSAGES: TypeAdapter[Any] = TypeAdapter(
    Annotated[Beat | Exchange | UserErrorMessage | NodeLostMessage, Field(discriminator="kind")]
)


class _Inbox:
    """Queue of messages received from one node."""

    def __init__(self, node: int, host: str) -> None:
        self._node, self._host = node, host
        self._received: queue.Queue[Exchange | UserErrorMessage | NodeLostMessage | Exception] = queue.Queue()
        self._parent = os.getppid()
        self.put = self._received.put

    def lose(self, error: Exception | None) -> None:
        """End the queue with the loss of the node."""
        reason = why_lost(error or ConnectionError(), LOST_AFTER_S)
        self._received.put(lost(self._node, self._host, reason).error())

    def receive(self, limit_s: float) -> Values:
        """Return the next values. Raises errors reported by that node, NodeLost if it is gone or silent."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                message = self._received.get(timeout=0.5)
            except queue.Empty:
                _exit_with_parent(self._parent)
                if time.monotonic() > deadline:
                    reason = f"it did not respond within {limit_s:g} s"
                    raise lost(self._node, self._host, reason).error() from None
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, UserErrorMessage):
                raise RemoteUserError(message.problem, message.advice)
            if isinstance(message, NodeLostMessage):
                raise message.failure.error()
            return message.values


class SecretFile:
    """Secret of a rendezvous, as a file that node 0 writes into the folder shared by all nodes.

    Other users cannot read it, as far as the file system enforces permissions.
    """

    def __init__(self, folder: Path, allocation: Allocation) -> None:
        name = re.sub(r"[^\w.-]", "_", f"rendezvous-{allocation.job}.{allocation.attempt}")
        self.path = folder / name

    def write(self) -> Secret:
        """Write a new secret that only this user can read; called on node 0."""
        secret = Secret.make()
        new = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.text)
        new.replace(self.path)
        return secret

    def read(self) -> Secret | None:
        """Read node 0's secret; None if not visible yet. UserError if it belongs to another user."""
        with contextlib.suppress(OSError):
            list(self.path.parent.iterdir())  # makes NFS refresh its cache
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        with os.fdopen(descriptor) as file:
            owner = os.fstat(descriptor).st_uid
            # The owner is this user, or the user a file server maps it to, as for the folder
            if owner not in (os.getuid(), self.path.parent.stat().st_uid):
                raise self._unusable(f"it belongs to user {owner}")
            return Secret(file.read(256)) or None

    def wait(self, limit_s: float) -> Secret:
        """Wait for the secret and return it. UserError if it is not visible within the limit."""
        deadline = time.monotonic() + limit_s
        parent = os.getppid()
        while (secret := self.read()) is None:
            _exit_with_parent(parent)
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.path}, written by node 0 of the job, is not visible on {socket.gethostname()}.",
                    "Use --output on a file system that all nodes share, and check that node 0 has started.",
                )
            time.sleep(0.5)
        return secret

    def remove(self) -> None:
        """Remove the secret's file after the rendezvous."""
        self.path.unlink(missing_ok=True)

    def _unusable(self, reason: str) -> UserError:
        return UserError(f"{self.path} is unusable: {reason}.", "Remove it, or use another --output.")


@contextlib.contextmanager
def join(
    allocation: Allocation, folder: Path, join_timeout_s: float = JOIN_TIMEOUT_S
) -> Iterator[Rendezvous]:
    """Join the rendezvous of a job's nodes; ``folder`` is shared by all of them.

    Raises UserError if node 0's secret is not visible here, NodeLost as :class:`Rendezvous` does.
    """
    if allocation.nodes == 1:
        with Rendezvous(allocation.address(Secret(""), "rendezvous")) as rendezvous:
            yield rendezvous
        return
    file = SecretFile(folder, allocation)
    if allocation.node > 0:
        with Rendezvous(
            allocation.address(file.wait(join_timeout_s), "rendezvous"), join_timeout_s, file.read
        ) as rendezvous:
            yield rendezvous
        return
    try:
        with Rendezvous(allocation.address(file.write(), "rendezvous"), join_timeout_s) as rendezvous:
            yield rendezvous
    finally:
        file.remove()


class RemoteUserError(UserError):
    """User error that another node has found and reports."""


class Rendezvous:
    """Exchange between the nodes of one job: node 0 is connected to all others, each of them to node 0.

    Raises NodeLost if not all nodes join within ``join_timeout_s``. With one node there are no peers.
    ``renew`` reads the secret again, in case the first one is from an earlier start of the job.
    """

    def __init__(
        self,
        address: NodeAddress,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        renew: Callable[[], Secret | None] = lambda: None,
    ) -> None:
        self._inboxes: dict[int, _Inbox] = {}
        self._link: Server[NodeRequest] | Client
        if address.node == 0:
            self._link = self._lead(address, join_timeout_s)
        else:
            inbox = self._inboxes[0] = _Inbox(0, address.main_host)
            request = NodeRequest(node=address.node, nodes=address.nodes, host=socket.gethostname())
            connection = call_node_0(
                address, request, MESSAGES, limit_s=join_timeout_s, silence_s=LOST_AFTER_S, renew=renew
            )
            self._link = Client(connection, received=inbox.put, ended=inbox.lose)

    def gather(self, node_0_values: Values, limit_s: float) -> list[Values]:
        """On node 0: receive the values of every node, ordered by node; ``node_0_values`` is node 0's."""
        deadline = time.monotonic() + limit_s
        inboxes = [inbox for _, inbox in sorted(self._inboxes.items())]
        return [node_0_values, *(inbox.receive(max(1.0, deadline - time.monotonic())) for inbox in inboxes)]

    def send(self, values: Values) -> None:
        """Send values, from node 0 to all other nodes, or from another node to node 0."""
        self._link.send(Exchange(values=values))

    def receive(self, limit_s: float) -> Values:
        """On other nodes: receive node 0's next values."""
        return self._inboxes[0].receive(limit_s)

    def __enter__(self) -> Rendezvous:
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

        def admit(peer: Peer[NodeRequest]) -> None:
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
            joined=admit,
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


def _reason(error: BaseException | None) -> UserErrorMessage | NodeLostMessage | None:
    """Return the message that makes the other nodes raise this error, too."""
    if isinstance(error, GangFailed):
        return NodeLostMessage(failure=error.failure)
    return (
        UserErrorMessage(problem=error.problem, advice=error.advice) if isinstance(error, UserError) else None
    )


def _exit_with_parent(parent: int) -> None:
    if lost_parent(parent):
        raise SystemExit("The process that started this one has ended.")
