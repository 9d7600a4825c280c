"""Transfers over plain TCP sockets with timeouts, for the mesh and for pairs without NCCL."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_HEADER = struct.Struct("<Q")  # size of the message, which is acknowledged by one byte
_CHUNK = 1 << 20
_ACK = b"k"
# struct tcp_info of linux/tcp.h: tcpi_total_retrans and tcpi_data_segs_out
_TCP_INFO_BYTES, _AGAIN_AT, _SEGMENTS_AT, _DATA_SEGMENTS = 256, 100, 156, struct.Struct("=I")
_IDLE_S = 30.0  # a sender that is silent for longer is considered gone


class Sink:
    """Server that receives and acknowledges messages in background threads."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="checklist-sink", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_drain, args=(connection,), name="checklist-drain", daemon=True).start()


def _drain(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with connection, contextlib.suppress(OSError, ConnectionError):
        connection.settimeout(_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            header = b""
            while len(header) < _HEADER.size:
                if not (data := connection.recv(_HEADER.size - len(header))):
                    return
                header += data
            remaining = _HEADER.unpack(header)[0]
            while remaining:
                if not (size := connection.recv_into(buffer, min(remaining, _CHUNK))):
                    return
                remaining -= size
            connection.sendall(_ACK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Result of a transfer. ``seconds``: duration of each acknowledged message."""

    connected: bool
    connect_s: float | None = None
    seconds: tuple[float, ...] = ()
    bytes: int = 0
    segments: int | None = None
    """TCP data segments including retransmissions; None if the kernel does not report them."""
    retransmitted: int | None = None
    round_trip_s: float | None = None
    """Shortest of the pings: round trips of an empty message."""
    error: str | None = None


class Sender:
    """A connection to another host's :class:`Sink`."""

    def __init__(self, address: str, port: int, connect_s: float) -> None:
        self._socket = socket.create_connection((address, port), timeout=connect_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, payload: memoryview, limit_s: float) -> float:
        """Send one message; return the seconds until it fully arrived. Raises OSError (TimeoutError)."""
        start = time.perf_counter()
        self._socket.settimeout(limit_s)
        self._socket.sendall(_HEADER.pack(len(payload)))
        self._socket.sendall(payload)
        self._socket.settimeout(max(0.001, limit_s - (time.perf_counter() - start)))
        if self._socket.recv(1) != _ACK:
            raise ConnectionError("the other end closed the connection")
        return time.perf_counter() - start

    def segments(self) -> tuple[int | None, int | None]:
        """Return the data segments sent so far, and how many were retransmissions."""
        try:
            tcp_info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return _DATA_SEGMENTS.unpack_from(tcp_info, _SEGMENTS_AT)[0], _DATA_SEGMENTS.unpack_from(
                tcp_info, _AGAIN_AT
            )[0]
        except (OSError, AttributeError, struct.error):  # a kernel before 4.6, or not Linux
            return None, None

    def close(self) -> None:
        self._socket.close()


def deliver(
    address: str,
    port: int,
    *,
    first: int,
    choose: Callable[[float], int] | None = None,
    repetitions: int = 0,
    least_s: float = 0.0,
    pings: int = 0,
    connect_s: float,
    limit_s: float,
) -> Transfer:
    """Connect and send ``first`` bytes, then ``repetitions`` messages of the size returned by ``choose``.

    ``choose`` receives the seconds of the first message. Repetitions continue until they took ``least_s`` in
    total, because messages of a millisecond measure the processor more than the network. ``limit_s`` applies
    to all messages together. ``pings``: number of empty messages after them.
    """
    start = time.perf_counter()
    try:
        sender = Sender(address, port, connect_s)
    except OSError as error:
        return Transfer(connected=False, error=f"connect: {_describe(error, connect_s)}")
    connect = time.perf_counter() - start
    deadline = time.perf_counter() + limit_s
    seconds: list[float] = []
    trip = math.inf
    size, problem = first, None
    payload = memoryview(bytes(size))
    try:
        while len(seconds) <= repetitions or sum(seconds[1:]) < least_s:
            seconds.append(sender.send(payload, max(0.001, deadline - time.perf_counter())))
            if len(seconds) == 1 and choose is not None and repetitions:
                size = choose(seconds[0])
                payload = memoryview(bytes(size))
        for _ in range(pings):
            trip = min(trip, sender.send(memoryview(b""), max(0.001, deadline - time.perf_counter())))
    except OSError as error:
        problem = f"{size} bytes: {_describe(error, limit_s)}"
    finally:
        segments, retransmitted = sender.segments()
        sender.close()
    return Transfer(
        connected=True,
        connect_s=connect,
        seconds=tuple(seconds),
        bytes=size,
        segments=segments,
        retransmitted=retransmitted,
        round_trip_s=trip if math.isfinite(trip) else None,
        error=problem,
    )


def _describe(error: OSError, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"not within {limit_s:g} s"
    return error.strerror or str(error)
