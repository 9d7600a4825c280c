"""Message channel between the processes of one run.

It is separate from the training's network: plain TCP, which still works when a collective hangs. One process
listens (launchers.cluster.listener), the others :func:`connect`, and both ends first prove that they know the
run's secret (launchers.cluster.greeting).

Then both send messages, each a length followed by JSON, which the receiver validates with a pydantic model:
anything invalid raises :class:`BadMessage`, with a one-line text, and ends only that connection. Nothing is
unpickled. After the greeting, messages are neither encrypted nor signed: an attacker who can modify packets
could also attack gloo and NCCL (docs/nodes.md).

multiprocessing.connection also has framing and HMAC, but its waits have no limit, its challenge is bound to
neither role nor run (and is MD5 up to Python 3.11), and its listener greets one caller after the other.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic

from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticSerializationError

from launchers.cluster.endpoint import Endpoint, Secret
from launchers.cluster.greeting import GREETING_S, BadMessage, Model, Silent, call, parse

MAX_MESSAGE_BYTES = 4 << 20
_LENGTH = 4


class Unreachable(Exception):  # noqa: N818 named for the event
    """No listener of this run was found in time; the text lists the problem at each port."""


class Connection(Generic[Model]):
    """Bidirectional connection. A peer that is silent for ``silence_s`` counts as lost."""

    def __init__(
        self,
        sock: socket.socket,
        messages: TypeAdapter[Model],
        *,
        silence_s: float,
        longest: int = MAX_MESSAGE_BYTES,
    ) -> None:
        sock.settimeout(silence_s)
        self._socket = sock
        self._messages, self._longest = messages, longest
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Model) -> bool:
        """Send a message; False if the peer is unreachable, which the receiving thread detects as well."""
        payload = _dump(message)
        if len(payload) > self._longest:
            raise ValueError(f"a message of {len(payload):,} bytes, more than the limit of {self._longest:,}")
        try:
            with self._sending:
                self._socket.sendall(len(payload).to_bytes(_LENGTH, "big") + payload)
        except OSError:
            with contextlib.suppress(OSError):  # the message may be sent in part, so nothing can follow
                self._socket.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def receive(self) -> Model:
        """Wait for the next message.

        Raises OSError (TimeoutError for a silent peer) if the peer is lost, BadMessage for an invalid
        message.
        """
        length = int.from_bytes(self._take(_LENGTH), "big")
        if length > self._longest:
            raise BadMessage(f"a message of {length:,} bytes, more than the limit of {self._longest:,}")
        return parse(self._messages, self._take(length))

    def finish(self) -> None:
        """End sending; the peer reads what was sent, and then sees the end.

        Closing at once, with unread data of the peer, would reset the connection and lose what was sent.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection; also wakes a receiving thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("connection closed")
            self._buffer += data
        chunk = bytes(self._buffer[:count])
        del self._buffer[:count]
        return chunk


class Heartbeat:
    """Thread that calls ``beat`` every second until stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(beat,), name="channel-heartbeat", daemon=True)
        self._thread.start()

    def _run(self, beat: Callable[[], None]) -> None:
        while not self._stop.wait(1.0):
            beat()

    def stop(self) -> None:
        """End the thread after the call in progress."""
        self._stop.set()


def connect(
    endpoint: Endpoint,
    request: BaseModel,
    messages: TypeAdapter[Any],
    *,
    limit_s: float,
    silence_s: float,
    longest: int = MAX_MESSAGE_BYTES,
    renew: Callable[[], Secret | None] = lambda: None,
) -> Connection[Any]:
    """Connect to the run's listener, which is searched at all ports of the endpoint.

    Retries for ``limit_s``, because the listener may not have started yet, and other programs may use its
    ports. After each round ``renew`` may return another secret, in case the endpoint's is from an earlier
    run.

    Raises Unreachable if there is no listener of this run, Refused if it does not admit this caller.
    """
    deadline = time.monotonic() + limit_s
    ports = list(endpoint.ports)
    problems: dict[int, str] = {}
    while True:
        for index, port in enumerate(ports):
            try:
                sock = call(endpoint, port, request, min(time.monotonic() + GREETING_S, deadline + 1.0))
            except Silent as error:  # the whole host may be silent, so the other ports are tried later
                problems[port] = str(error)
                ports = ports[index + 1 :] + ports[: index + 1]
                break
            except BadMessage as error:
                problems[port] = str(error)
                continue
            except OSError as error:  # an earlier problem at this port is more informative
                problems.setdefault(port, error.strerror or str(error))
                continue
            return Connection(sock, messages, silence_s=silence_s, longest=longest)
        if time.monotonic() > deadline:
            raise Unreachable(
                "; ".join(f"port {port}: {problem}" for port, problem in sorted(problems.items()))
            )
        time.sleep(0.2)
        endpoint = replace(endpoint, secret=renew() or endpoint.secret)


def _dump(message: BaseModel) -> bytes:
    try:
        return message.model_dump_json().encode()
    except (
        PydanticSerializationError,
        UnicodeEncodeError,
    ):  # a lone surrogate, as in some file names
        return json.dumps(message.model_dump(), ensure_ascii=False).encode(errors="replace")
