"""The listening end of the channel: who calls is greeted, and those of the run are handed on."""

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
from launchers.cluster.channel import LONGEST_MESSAGE, Connection
from launchers.cluster.endpoint import Endpoint
from launchers.cluster.greeting import GREETING_S, BadMessage, Model, Reply, hear
from launchers.cluster.processes import is_loopback

MOST_STRANGERS = 256  # that are greeted at once; more wait in the kernel's queue
STRANGER_S = 1.0  # after so long a stranger gives way to others that wait
_BACK_OFF_S = 0.05
_MAPPED = "::ffff:"  # how a socket for both families shows an IPv4 address
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SPARE_DESCRIPTORS = 256  # for all else that the listening process opens


class Guest(Generic[Model]):
    """A caller that has proved to know the secret, and waits to be taken in or refused."""

    def __init__(self, sock: socket.socket, claim: Model, answer: Callable[[Reply], None]) -> None:
        self.claim = claim
        self.address: str = sock.getpeername()[0].removeprefix(_MAPPED)
        """From where it calls."""
        self._socket, self._answer = sock, answer

    def accept(
        self,
        messages: TypeAdapter[Any],
        *,
        silence_s: float,
        longest: int = LONGEST_MESSAGE,
    ) -> Connection[Any]:
        """Take it in. Raises OSError when it has gone meanwhile."""
        try:
            self._answer(Reply())
        except OSError:
            self._socket.close()
            raise
        return Connection(self._socket, messages, silence_s=silence_s, longest=longest)

    def refuse(self, why: str) -> None:
        """Tell it in one line why not, and end the connection."""
        with contextlib.suppress(OSError):
            self._answer(Reply(refused=why))
        self._socket.close()


class Listener(Generic[Model]):
    """Greets callers, each in a thread of its own, and hands those that know the secret to ``welcome``.

    ``welcome`` is called in the caller's thread, which is its own from then on. Strangers do no harm: what
    they send is limited in time, size and number, and when the process has no file descriptors left, those
    that keep it waiting are sent away. On a loopback host only this machine can call.

    Raises UserError where none of the ports is free.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        claims: type[Model],
        welcome: Callable[[Guest[Model]], None],
        *,
        callers: int,  # of this run, that may be connected at once
    ) -> None:
        self._endpoint, self._welcome = endpoint, welcome
        self._claims: TypeAdapter[Model] = TypeAdapter(claims)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # when each came, the oldest first
        _allow_descriptors(callers + MOST_STRANGERS + _SPARE_DESCRIPTORS)
        self._socket = _listen(endpoint)
        self._thread = threading.Thread(target=self._accept, name="channel-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take nobody in any more; the port is free when this returns."""
        self._closed.set()
        # close() alone would leave the thread in accept(), and with it the port.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._socket.close()
        self._send_away(older_than_s=0.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._has_room():
                self._closed.wait(0.01)
                continue
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # of one that has hung up already (ECONNABORTED), or nothing is left
                if error.errno in _EXHAUSTED:
                    self._send_away(older_than_s=STRANGER_S)
                self._closed.wait(_BACK_OFF_S)
                continue
            with self._lock:
                self._strangers[sock] = time.monotonic()
            try:
                threading.Thread(target=self._greet, args=(sock,), name="channel-peer", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._forget(sock)
                sock.close()
                self._closed.wait(_BACK_OFF_S)

    def _has_room(self) -> bool:
        """Whether one more can be greeted; else those that take long are sent away."""
        with self._lock:
            if len(self._strangers) < MOST_STRANGERS:
                return True
        self._send_away(older_than_s=STRANGER_S)
        return False

    def _send_away(self, *, older_than_s: float) -> None:
        """End greetings that have taken so long; their own threads close them."""
        now = time.monotonic()
        with self._lock:
            for sock, since in self._strangers.items():
                if now - since >= older_than_s:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)

    def _greet(self, sock: socket.socket) -> None:
        try:
            claim, answer = hear(sock, self._endpoint, self._claims, time.monotonic() + GREETING_S)
        except (OSError, BadMessage):
            sock.close()
            return
        finally:
            self._forget(sock)
        self._welcome(Guest(sock, claim, answer))


def bind(host: str, port: int) -> socket.socket:
    """A socket at that port: of this machine's loopback where the host is that, else of all its addresses."""
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
    """As many open files as the listening process may need, where its limit can be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


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
        f"None of the ports where the run's processes meet is free ({'; '.join(problems)}).",
        "End what holds them, or give other ports.",
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
