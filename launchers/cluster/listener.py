"""Listening end of the channel: authenticates callers and passes those of the run on."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic

from pydantic import TypeAdapter

from estimator.errors import UserError
from launchers.cluster.channel import MAX_MESSAGE_BYTES, Connection
from launchers.cluster.endpoint import Endpoint
from launchers.cluster.greeting import GREETING_S, BadMessage, Model, authenticate
from launchers.cluster.processes import is_loopback

MAX_UNAUTHENTICATED = 256  # callers greeted at the same time; more wait in the kernel's queue
UNAUTHENTICATED_S = 1.0  # after this time a caller is dropped if others wait
_BACK_OFF_S = 0.05
_MAPPED = "::ffff:"  # prefix of an IPv4 address on a dual-stack socket
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SPARE_DESCRIPTORS = 256  # for other files of the listening process


class Caller(Generic[Model]):
    """Authenticated caller that waits to be admitted or refused."""

    def __init__(self, sock: socket.socket, request: Model, reply: Callable[[str | None], None]) -> None:
        self.request = request
        self.address: str = sock.getpeername()[0].removeprefix(_MAPPED)  # IP address
        self._socket, self._reply = sock, reply

    def accept(
        self,
        messages: TypeAdapter[Any],
        *,
        silence_s: float,
        longest: int = MAX_MESSAGE_BYTES,
    ) -> Connection[Any]:
        """Admit the caller. Raises OSError if it has disconnected meanwhile."""
        try:
            self._reply(None)
        except OSError:
            self._socket.close()
            raise
        return Connection(self._socket, messages, silence_s=silence_s, longest=longest)

    def refuse(self, reason: str) -> None:
        """Send the reason in one line, and end the connection."""
        with contextlib.suppress(OSError):
            self._reply(reason)
        self._socket.close()


class Listener(Generic[Model]):
    """Authenticates callers, each in its own thread, and passes them to ``serve``.

    ``serve`` is called in the caller's thread, which it may keep. Unauthenticated callers are limited in
    time, size and number, and when the process has no file descriptors left, slow ones are dropped. With a
    loopback host only this machine can connect.

    Raises UserError if none of the ports is free.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        request_type: type[Model],
        serve: Callable[[Caller[Model]], None],
        *,
        callers: int,  # maximum number of connected callers of this run
    ) -> None:
        self._endpoint, self._serve = endpoint, serve
        self._requests: TypeAdapter[Model] = TypeAdapter(request_type)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, float] = {}  # time of connection, oldest first
        _allow_descriptors(callers + MAX_UNAUTHENTICATED + _SPARE_DESCRIPTORS)
        self._socket = _listen(endpoint)
        self._thread = threading.Thread(target=self._accept, name="channel-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the port is free when this returns."""
        self._closed.set()
        # close() alone would leave the thread in accept(), and with it the port.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._socket.close()
        self._drop(older_than_s=0.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._has_capacity():
                self._closed.wait(0.01)
                continue
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # caller has disconnected (ECONNABORTED), or resources are exhausted
                if error.errno in _EXHAUSTED:
                    self._drop(older_than_s=UNAUTHENTICATED_S)
                self._closed.wait(_BACK_OFF_S)
                continue
            with self._lock:
                self._unauthenticated[sock] = time.monotonic()
            try:
                threading.Thread(target=self._greet, args=(sock,), name="channel-peer", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._forget(sock)
                sock.close()
                self._closed.wait(_BACK_OFF_S)

    def _has_capacity(self) -> bool:
        """Whether another caller can be greeted; otherwise slow ones are dropped."""
        with self._lock:
            if len(self._unauthenticated) < MAX_UNAUTHENTICATED:
                return True
        self._drop(older_than_s=UNAUTHENTICATED_S)
        return False

    def _drop(self, *, older_than_s: float) -> None:
        """End greetings older than this; their threads close the sockets."""
        now = time.monotonic()
        with self._lock:
            for sock, since in self._unauthenticated.items():
                if now - since >= older_than_s:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(sock, None)

    def _greet(self, sock: socket.socket) -> None:
        try:
            request, reply = authenticate(sock, self._endpoint, self._requests, time.monotonic() + GREETING_S)
        except (OSError, BadMessage):
            sock.close()
            return
        finally:
            self._forget(sock)
        self._serve(Caller(sock, request, reply))


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the port: on loopback for a loopback host, otherwise on all addresses."""
    if is_loopback(host):
        return _bound(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    if socket.has_dualstack_ipv6():
        try:
            return _bound(socket.AF_INET6, "", port)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):  # IPv4 alone would not help
                raise
    return _bound(socket.AF_INET, "", port)


def _allow_descriptors(count: int) -> None:
    """Raise the limit of open files to what the listening process may need, if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(count, hard)  # never RLIM_INFINITY (-1) on Linux: fs.nr_open limits both
    if soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _listen(endpoint: Endpoint) -> socket.socket:
    problems = []
    for port in endpoint.ports:
        try:
            sock = bind(endpoint.host, port)
        except OSError as error:
            problems.append(f"{port}: {error.strerror or error}")
            continue
        sock.settimeout(0.5)
        sock.listen(1024)
        return sock
    raise UserError(
        f"None of the rendezvous ports is free ({'; '.join(problems)}).",
        "End the processes that use them, or choose other ports.",
    )


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not host:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
