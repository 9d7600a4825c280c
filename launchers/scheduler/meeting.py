"""Where the nodes of a job meet before they train: each says what it has, node 0 says what is to be done.

Over the control channel's own lines and handshake (launchers.gang.control). Both ends are used alike:
what one says the other hears; what has failed on one node is raised on all.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from types import TracebackType

from estimator.errors import UserError
from launchers.cluster.channel import NodeAddress
from launchers.gang.control import HANDSHAKE_S, Heart, Line, Message, lost, proof, why_lost
from launchers.gang.failures import Failure, GangFailed
from launchers.gang.hub import challenge, listen
from launchers.gang.member import find_main_node

COME_S = 300.0  # for all nodes to be there
LOST_AFTER_S = 60.0  # of silence; node 0 may be busy with tokenising


class Peer:
    """The other end of one line, heard by a thread of its own."""

    def __init__(self, line: Line, node: int, host: str) -> None:
        self.node, self.host = node, host
        self._line = line
        self._heard: queue.Queue[Message | Exception] = queue.Queue()
        self._parent = os.getppid()
        line.patience(LOST_AFTER_S)
        self._heart = Heart(lambda: self._send({"kind": "beat"}))
        threading.Thread(target=self._listen, name="meeting", daemon=True).start()

    def say(self, values: Message) -> None:
        """Tell the other end."""
        self._send({"kind": "say", "values": values})

    def fail(self, error: UserError | GangFailed) -> None:
        """Tell it what has failed, which it raises too."""
        if isinstance(error, GangFailed):
            self._send({"kind": "lost", "failure": error.failure.to_dict()})
        else:
            self._send({"kind": "failed", "problem": error.problem, "advice": error.advice})

    def hear(self, limit_s: float) -> Message:
        """What the other end says next. Raises what has failed there, NodeLost when it is gone or silent."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                found = self._heard.get(timeout=0.5)
            except queue.Empty:
                if os.getppid() != self._parent:
                    raise SystemExit("the end of the process that had started it") from None
                if time.monotonic() > deadline:
                    raise lost(
                        self.node, self.host, f"it did not answer within {limit_s:g} s"
                    ).error() from None
                continue
            if isinstance(found, Exception):
                raise found
            if found["kind"] == "failed":
                raise ElsewhereError(found["problem"], found["advice"])
            if found["kind"] == "lost":
                raise Failure.from_dict(found["failure"]).error()
            values: Message = found["values"]
            return values

    def close(self) -> None:
        """End the line."""
        self._heart.stop()
        self._line.close()

    def _send(self, message: Message) -> None:
        self._line.send(message)  # where that fails, the listening thread finds out too

    def _listen(self) -> None:
        try:
            while True:
                message = self._line.receive()
                if message["kind"] != "beat":
                    self._heard.put(message)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._heard.put(lost(self.node, self.host, why_lost(error, LOST_AFTER_S)).error())


class ElsewhereError(UserError):
    """A user's mistake that another node has found, and shows."""


class Meeting:
    """The nodes of one job. On node 0 all others are peers; on the others node 0 is the only one.

    Raises NodeLost where not all nodes are there within ``come_s``. With one node there is nobody to meet.
    """

    def __init__(self, address: NodeAddress, come_s: float = COME_S) -> None:
        self._address = address
        self._peers: dict[int, Peer] = {}
        if address.nodes == 1:
            return
        if address.node == 0:
            self._peers = _come_in(address, come_s)
        else:
            line = find_main_node(address, come_s, {})
            self._peers = {0: Peer(line, 0, address.main_host)}

    def gather(self, own: Message, limit_s: float) -> list[Message]:
        """On node 0: what each node says, by node; ``own`` is node 0's."""
        deadline = time.monotonic() + limit_s
        heard = [peer.hear(max(1.0, deadline - time.monotonic())) for _, peer in sorted(self._peers.items())]
        return [own, *heard]

    def say(self, values: Message) -> None:
        """From node 0 to all; from another to node 0."""
        for peer in self._peers.values():
            peer.say(values)

    def hear(self, limit_s: float) -> Message:
        """On other nodes: what node 0 says next."""
        return self._peers[0].hear(limit_s)

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
    """Node 0: wait for all the others."""
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
    with listen(address) as listener:
        listener.settimeout(0.5)
        while len(peers) < address.nodes - 1:
            if os.getppid() != parent:
                raise SystemExit("the end of the process that had started it")
            if time.monotonic() > deadline:
                raise _missing(address, peers, limit_s)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            peer = _greet(address, connection)
            if peer is None:
                continue
            if peer.node in peers:  # two that say they are the same node
                peer.close()
            else:
                peers[peer.node] = peer


def _greet(address: NodeAddress, connection: socket.socket) -> Peer | None:
    """Take a node in; None when it is not one of ours."""
    line = Line(connection, HANDSHAKE_S)
    try:
        hello = challenge(line, address.token)
        if hello is not None and 0 < int(hello["node"]) < address.nodes == hello["nodes"]:
            line.send({"kind": "welcome", "proof": proof(address.token, "hub", str(hello["nonce"]))})
            return Peer(line, int(hello["node"]), str(hello["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        line.close()
        return None
    line.close()
    return None


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
