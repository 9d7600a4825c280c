"""The channel between the processes of one run: who may take part, and what they say to each other.

It is not the training's own network: plain TCP, so that it still works when a collective hangs. One process
listens (:class:`Listener`), the others :func:`connect`. Before anything else both prove that they know the
run's secret, within one limit for the whole greeting::

    listener -> caller   magic, nonce                                   nothing of the caller's is read before
    caller -> listener   magic, nonce, length, claim, proof             4 KB at most; who it says it is
    listener -> caller   proof, length, answer                          taken in, or why not

A proof is HMAC-SHA256 over the role, both nonces and what is said. Its key comes of the secret and of the
run's name (run, step, attempt, purpose): a recorded greeting, one of another attempt, or one that is sent
back to where it came from proves nothing. A claim is looked into once its proof is right, and not before.

Then both send messages, each a length and JSON, which a pydantic model checks where it arrives: what is no
message of ours raises :class:`BadMessage`, one line, and ends that connection only. Nothing is unpickled.
What follows the greeting is neither encrypted nor signed: who can change packets on their way could do that
to gloo and NCCL too (docs/nodes.md).

multiprocessing.connection has framing and HMAC too, but its waits have no limit, its challenge is bound to
neither role nor run (and is MD5 up to Python 3.11), and its listener greets one caller after the other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from estimator.errors import UserError
from launchers.cluster.processes import is_loopback

GREETING_S = 5.0  # for all of a greeting
MOST_STRANGERS = 256  # that are greeted at once; more wait in the kernel's queue
STRANGER_S = 1.0  # after so long a stranger gives way to others that wait
LONGEST_MESSAGE = 4 << 20
_MAGIC = b"finetune-channel/1\n"
_NONCE = 32
_PROOF = 32
_MOST_SAID = 3_900  # bytes of a claim or an answer: a greeting stays below 4 KB
_LENGTH = 4
_BACK_OFF_S = 0.05
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SPARE_DESCRIPTORS = 256  # for all else that the listening process opens

Model = TypeVar("Model", bound=BaseModel)


class BadMessage(ValueError):  # noqa: N818 it says what has come
    """What has come is no message of ours; the text is one line."""


class Refused(Exception):  # noqa: N818 it says what has happened
    """The listener knows the secret and does not take this caller in; the text says why."""


class Unreachable(Exception):  # noqa: N818 it says what has happened
    """No listener of this run was found in time; the text says what was found at each port."""


@dataclass(frozen=True)
class Secret:
    """What the processes of one run know and nobody else; it shows in no log, card or traceback."""

    text: str = field(repr=False)

    @classmethod
    def make(cls) -> Secret:
        """A new one, of 32 random bytes."""
        return cls(secrets.token_hex(32))

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the processes of a run meet, and what they prove to each other there."""

    host: str  # name or address of the one that listens, as the others reach it
    ports: tuple[int, ...]  # where it may listen; the first free one is taken
    secret: Secret
    run: str  # run, step, attempt and purpose: proven along with the secret

    def prove(self, role: str, challenge: bytes, nonce: bytes, said: bytes) -> bytes:
        """That whoever is in this role knows the secret; ``challenge`` is the other's nonce."""
        key = hmac.digest(self.secret.text.encode(), _MAGIC + self.run.encode(), hashlib.sha256)
        return hmac.digest(key, role.encode() + b"\n" + challenge + nonce + said, hashlib.sha256)


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """One node's place in its gang."""

    node: int  # 0: the main node
    nodes: int
    main_host: str  # name or address of node 0
    ports: tuple[int, ...]  # where node 0 may listen; the first free one is taken
    secret: Secret  # of the run
    run: str  # run, step and attempt: another attempt's nodes are not joined

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} of {self.nodes}: must be from 0 to nodes - 1")
        if self.nodes > 1 and not self.ports:
            raise ValueError("ports: give at least one port for more than one node")
        if self.nodes > 1 and not self.secret:
            raise ValueError("secret: more than one node must have one")

    @property
    def endpoint(self) -> Endpoint:
        """Where the nodes meet."""
        return Endpoint(host=self.main_host, ports=self.ports, secret=self.secret, run=self.run)


class _Silent(Exception):  # noqa: N818 it says what has happened
    """Nothing answers at a host's port."""


class Message(BaseModel):
    """A message or a claim: its fields are checked where it arrives, and no others may be there."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class _Answer(Message):
    refused: str | None = None


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
        return _parse(self._messages, self._take(length))

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


class Guest(Generic[Model]):
    """A caller that has proved to know the secret, and waits to be taken in or refused."""

    def __init__(self, sock: socket.socket, claim: Model, answer: Callable[[_Answer], None]) -> None:
        self.claim = claim
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
            self._answer(_Answer())
        except OSError:
            self._socket.close()
            raise
        return Connection(self._socket, messages, silence_s=silence_s, longest=longest)

    def refuse(self, why: str) -> None:
        """Tell it in one line why not, and end the connection."""
        with contextlib.suppress(OSError):
            self._answer(_Answer(refused=why))
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
            guest = self._hear(sock, time.monotonic() + GREETING_S)
        except (OSError, BadMessage):
            guest = None
        finally:
            self._forget(sock)
        if guest is None:
            sock.close()
            return
        self._welcome(guest)

    def _hear(self, sock: socket.socket, deadline: float) -> Guest[Model]:
        """The caller, once it has proved itself. Raises OSError or BadMessage where it has not."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = secrets.token_bytes(_NONCE)
        _send(sock, _MAGIC + challenge, deadline)
        if _take(sock, len(_MAGIC), deadline) != _MAGIC:
            raise BadMessage("another protocol")
        nonce = _take(sock, _NONCE, deadline)
        said = _take_said(sock, deadline)
        proof = _take(sock, _PROOF, deadline)
        if not hmac.compare_digest(proof, self._endpoint.prove("caller", challenge, nonce, said)):
            raise BadMessage("another secret, or another run")
        if _has_gone(sock):  # it has called a second time meanwhile, or was ended
            raise ConnectionError("the caller has gone")

        def answer(words: _Answer) -> None:
            payload = _clip(words).model_dump_json().encode()
            own = self._endpoint.prove("listener", nonce, challenge, payload)
            _send(sock, own + len(payload).to_bytes(_LENGTH, "big") + payload, deadline)

        try:
            claim = _parse(self._claims, said)
        except BadMessage as error:
            with contextlib.suppress(OSError):
                answer(_Answer(refused=str(error)))
            raise
        return Guest(sock, claim, answer)


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
        """No further call is begun."""
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
                sock = _call(endpoint, port, claim, min(time.monotonic() + GREETING_S, deadline + 1.0))
            except _Silent as error:  # the host may be so as a whole: not all its ports are waited for now
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


def _call(endpoint: Endpoint, port: int, claim: BaseModel, deadline: float) -> socket.socket:
    """Greet whoever listens there. Raises OSError or BadMessage where that is nobody of this run."""
    try:
        sock = socket.create_connection((endpoint.host, port), timeout=_left(deadline))
    except TimeoutError:
        raise _Silent("nothing answers") from None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _take(sock, len(_MAGIC), deadline) != _MAGIC:
            raise BadMessage("something else listens there")
        challenge = _take(sock, _NONCE, deadline)
        nonce = secrets.token_bytes(_NONCE)
        said = claim.model_dump_json().encode()
        if len(said) > _MOST_SAID:
            raise ValueError(f"a claim of {len(said):,} bytes, where {_MOST_SAID:,} are the most")
        own = endpoint.prove("caller", challenge, nonce, said)
        _send(sock, _MAGIC + nonce + len(said).to_bytes(_LENGTH, "big") + said + own, deadline)
        try:
            proof = _take(sock, _PROOF, deadline)
        except ConnectionError:
            raise BadMessage("another run listens there, or one with another secret") from None
        payload = _take_said(sock, deadline)
        if not hmac.compare_digest(proof, endpoint.prove("listener", nonce, challenge, payload)):
            raise BadMessage("who listens there does not know the secret")
        answer = _parse(TypeAdapter(_Answer), payload)
        if answer.refused is not None:
            raise Refused(answer.refused)
    except BaseException:
        sock.close()
        raise
    return sock


def _dump(message: BaseModel) -> bytes:
    try:
        return message.model_dump_json().encode()
    except (PydanticSerializationError, UnicodeEncodeError):  # half a character, as in a broken file name
        return json.dumps(message.model_dump(), ensure_ascii=False).encode(errors="replace")


def _parse(messages: TypeAdapter[Model], payload: bytes) -> Model:
    try:
        return messages.validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadMessage(" ".join(f"no message of ours: {where} {first['msg']}".split())[:300]) from None


def _clip(answer: _Answer) -> _Answer:
    """Short enough for a greeting, whatever a character of it becomes in JSON."""
    return _Answer(refused=answer.refused[:600]) if answer.refused else answer


def _take_said(sock: socket.socket, deadline: float) -> bytes:
    length = int.from_bytes(_take(sock, _LENGTH, deadline), "big")
    if length > _MOST_SAID:
        raise BadMessage("a greeting that is too long")
    return _take(sock, length, deadline)


def _take(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly so many bytes, all of them before the deadline however slowly they come."""
    taken = b""
    while len(taken) < count:
        sock.settimeout(_left(deadline))
        data = sock.recv(count - len(taken))
        if not data:
            raise ConnectionError("connection closed")
        taken += data
    return taken


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no whole greeting in time")
    return left


def _has_gone(sock: socket.socket) -> bool:
    """Whether the caller has closed, or has said more than its part."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    return True


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
