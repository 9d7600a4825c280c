"""The control channel between the nodes' tasks: who is there, who has failed and why, when all are done.

It is not the training's own network: plain TCP with one JSON object a line, so that it still works when
a collective hangs. Node 0 (:class:`Hub`) listens, the others (:class:`Member`) connect::

    hub -> member   challenge {nonce}
    member -> hub   hello {node, nodes, host, start_step, nonce, proof}
                    proof: HMAC-SHA256 of the other's nonce, with the token as its key
    hub -> member   welcome {proof} | refused {why} | verdict {failure}
    hub -> member   go {port}                             all nodes are there; torch's port
    both            beat                                  each second
    member -> hub   failed {failure} | part {step} | done | bye
    hub -> member   verdict {failure or null}             the end, the same on every node

``Hub`` and ``Member`` are used alike (:class:`Control`).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from launchers.gang.failures import Failure

Message = dict[str, Any]
HANDSHAKE_S = 5.0
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """The limits of every wait, in seconds."""

    rendezvous: float = 300.0  # until all nodes are there, and again until their ranks run
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


class Control(Protocol):
    """What a node's task needs of the channel; all calls return at once, save :meth:`join`."""

    def join(self) -> int:
        """Wait for all nodes; returns torch's port. Raises GangFailed, or UserError when refused."""

    def fail(self, failure: Failure) -> None:
        """Tell what has gone wrong on this node."""

    def part_stored(self, step: int) -> None:
        """Tell that this node's part of a checkpoint is in the store."""

    def done(self) -> None:
        """Tell that this node's ranks have finished and its checkpoints are stored."""

    def verdict(self) -> Verdict | None:
        """The end, once it is known."""

    def whole_steps(self) -> list[int]:
        """Checkpoints all parts of which were stored since the last call (on node 0)."""

    def others_done(self) -> bool:
        """Whether nothing is left to wait for but this node. Node 0 is the last to be done: before, it
        commits the checkpoints."""

    def parts_missing(self) -> bool:
        """Whether another node may still store its part of a checkpoint that this one has (on node 0)."""

    def close(self) -> None:
        """Say goodbye. The others don't count this node as lost."""


def proof(token: str, who: str, nonce: str) -> str:
    return hmac.new(token.encode(), f"{who}:{nonce}".encode(), hashlib.sha256).hexdigest()


class Line:
    """One connection: JSON lines both ways. A peer that is silent for ``lost_after`` s counts as lost."""

    def __init__(self, connection: socket.socket, lost_after: float) -> None:
        connection.settimeout(lost_after)
        self._socket = connection
        self._buffer = b""
        self._send_lock = threading.Lock()

    def send(self, message: Message) -> bool:
        """False when the peer can't be reached; its reader finds out too."""
        try:
            with self._send_lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> Message:
        """The next message. OSError (TimeoutError when silent) or ValueError when the peer is lost."""
        while b"\n" not in self._buffer:
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionError("connection closed")
            self._buffer += data
            if len(self._buffer) > _LONGEST_LINE:
                raise ValueError("not a control channel")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a control channel")
        return message

    def patience(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Heart:
    """Calls ``beat`` each second from a thread of its own until stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(beat,), name="gang-heart", daemon=True)
        self._thread.start()

    def _run(self, beat: Callable[[], None]) -> None:
        while not self._stop.wait(1.0):
            beat()

    def stop(self) -> None:
        self._stop.set()


def lost(node: int, host: str, why: str) -> Failure:
    return Failure(
        kind="node",
        node=node,
        host=host,
        at=time.time(),
        message=f"node {node} ({host}) was lost: {why}",
    )


def why_lost(error: Exception, lost_after: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it has said nothing for {lost_after:g} s"
    return "its connection broke without a goodbye (its task was killed, or the machine went away)"
