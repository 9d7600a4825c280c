"""The channel between the processes of one run: what they say to each other.

It is not the training's own network: plain TCP, so that it still works when a collective hangs. One process
listens (launchers.cluster.listener), the others :func:`connect`, and before anything else both prove that
they know the run's secret (launchers.cluster.greeting).

Then both send messages, each a length and JSON, which a pydantic model checks where it arrives: what is no
message of ours raises :class:`BadMessage`, one line, and ends that connection only. Nothing is unpickled.
What follows the greeting is neither encrypted nor signed: who can change packets on their way could do that
to gloo and NCCL too (docs/nodes.md).

multiprocessing.connection has framing and HMAC too, but its waits have no limit, its challenge is bound to
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

LONGEST_MESSAGE = 4 << 20
_LENGTH = 4


class Unreachable(Exception):  # noqa: N818 it says what has happened
    """No listener of this run was found in time; the text says what was found at each port."""


class Connection(Generic[Model]):
    """Messages both ways. A peer that is silent for ``silence_s`` counts as lost."""

    def __init__(
        self,
        sock: socket.socket,
        messages: TypeAdapter[Model],
        *,
        silence_s: float,
        longest: int = LONGEST_MESSAGE,
    ) -> None:
        sock.settimeout(silence_s)
        self._socket = sock
        self._messages, self._longest = messages, longest
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Model) -> bool:
        """Send a message; False when the peer can't be reached, which whoever receives here finds out too."""
        payload = _dump(message)
        if len(payload) > self._longest:
            raise ValueError(f"a message of {len(payload):,} bytes, where {self._longest:,} are the most")
        try:
            with self._sending:
                self._socket.sendall(len(payload).to_bytes(_LENGTH, "big") + payload)
        except OSError:
            with contextlib.suppress(OSError):  # perhaps half of it has gone: nothing can follow
                self._socket.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def receive(self) -> Model:
        """The next message.

        Raises OSError (TimeoutError when the peer is silent) when the peer is lost, BadMessage when it sends
        what is none.
        """
        length = int.from_bytes(self._take(_LENGTH), "big")
        if length > self._longest:
            raise BadMessage(f"a message of {length:,} bytes, where {self._longest:,} are the most")
        return parse(self._messages, self._take(length))

    def finish(self) -> None:
        """Send nothing more; the peer reads what was sent, and then sees the end.

        To close at once, with something of the peer's unread, would reset the connection and lose it.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection; also wakes whoever receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("connection closed")
            self._buffer += data
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


class Heartbeat:
    """Calls ``beat`` each second from a thread of its own until stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(beat,), name="channel-heartbeat", daemon=True)
        self._thread.start()

    def _run(self, beat: Callable[[], None]) -> None:
        while not self._stop.wait(1.0):
            beat()

    def stop(self) -> None:
        """End the thread after the call that it is at."""
        self._stop.set()


def connect(
    endpoint: Endpoint,
    claim: BaseModel,
    messages: TypeAdapter[Any],
    *,
    limit_s: float,
    silence_s: float,
    longest: int = LONGEST_MESSAGE,
    renew: Callable[[], Secret | None] = lambda: None,
) -> Connection[Any]:
    """A connection to the run's listener, found behind one of its ports.

    Tries until ``limit_s`` are over: it may not listen yet, and others may listen on its ports. After each
    round ``renew`` may give another secret, where the endpoint's may be an earlier run's.

    Raises Unreachable where there is no listener of this run, Refused when it does not take this caller in.
    """
    deadline = time.monotonic() + limit_s
    ports = list(endpoint.ports)
    problems: dict[int, str] = {}
    while True:
        for at, port in enumerate(ports):
            try:
                sock = call(endpoint, port, claim, min(time.monotonic() + GREETING_S, deadline + 1.0))
            except Silent as error:  # the host may be so as a whole: not all its ports are waited for now
                problems[port] = str(error)
                ports = ports[at + 1 :] + ports[: at + 1]
                break
            except BadMessage as error:
                problems[port] = str(error)
                continue
            except OSError as error:  # says less than what was heard there before
                problems.setdefault(port, error.strerror or str(error))
                continue
            return Connection(sock, messages, silence_s=silence_s, longest=longest)
        if time.monotonic() > deadline:
            raise Unreachable("; ".join(f"port {port}: {why}" for port, why in sorted(problems.items())))
        time.sleep(0.2)
        endpoint = replace(endpoint, secret=renew() or endpoint.secret)


def _dump(message: BaseModel) -> bytes:
    try:
        return message.model_dump_json().encode()
    except (PydanticSerializationError, UnicodeEncodeError):  # half a character, as in a broken file name
        return json.dumps(message.model_dump(), ensure_ascii=False).encode(errors="replace")
