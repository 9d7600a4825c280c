"""How two processes prove to each other that they are of one run, before either reads what the other says.

All within one limit of time for the whole greeting::

    listener -> caller   magic, nonce                                   nothing of the caller's is read before
    caller -> listener   magic, nonce, length, claim, proof             4 KB at most; who it says it is
    listener -> caller   proof, length, answer                          taken in, or why not

A proof is HMAC-SHA256 over the role, both nonces and what is said (:meth:`Endpoint.prove`). Its key comes of
the secret and of the run's name (run, step, attempt, purpose): a recorded greeting, one of another attempt,
or one that is sent back to where it came from proves nothing. A claim is looked into once its proof is
right, and not before.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from launchers.cluster.endpoint import MAGIC, Endpoint

GREETING_S = 5.0  # for all of a greeting
_NONCE = 32
_PROOF = 32
_MOST_SAID = 3_900  # bytes of a claim or an answer: a greeting stays below 4 KB
_LENGTH = 4

Model = TypeVar("Model", bound=BaseModel)


class BadMessage(ValueError):  # noqa: N818 it says what has come
    """What has come is no message of ours; the text is one line."""


class Refused(Exception):  # noqa: N818 it says what has happened
    """The listener knows the secret and does not take this caller in; the text says why."""


class Silent(Exception):  # noqa: N818 it says what has happened
    """Nothing answers at a host's port."""


class Message(BaseModel):
    """A message or a claim: its fields are checked where it arrives, and no others may be there."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Reply(Message):
    """The listener's last word of a greeting."""

    refused: str | None = None  # why not; None: taken in


def call(endpoint: Endpoint, port: int, claim: BaseModel, deadline: float) -> socket.socket:
    """Greet whoever listens there. Raises OSError or BadMessage where that is nobody of this run."""
    sock = _connect(endpoint.host, port, deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _take(sock, len(MAGIC), deadline) != MAGIC:
            raise BadMessage("something else listens there")
        challenge = _take(sock, _NONCE, deadline)
        nonce = secrets.token_bytes(_NONCE)
        said = claim.model_dump_json().encode()
        if len(said) > _MOST_SAID:
            raise ValueError(f"a claim of {len(said):,} bytes, where {_MOST_SAID:,} are the most")
        own = endpoint.prove("caller", challenge, nonce, said)
        _send(sock, MAGIC + nonce + len(said).to_bytes(_LENGTH, "big") + said + own, deadline)
        try:
            proof = _take(sock, _PROOF, deadline)
        except ConnectionError:
            raise BadMessage("another run listens there, or one with another secret") from None
        payload = _take_said(sock, deadline)
        if not hmac.compare_digest(proof, endpoint.prove("listener", nonce, challenge, payload)):
            raise BadMessage("who listens there does not know the secret")
        answer = parse(TypeAdapter(Reply), payload)
        if answer.refused is not None:
            raise Refused(answer.refused)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to whichever of the host's addresses answers, each of which gets a part of the time.

    Of a host with IPv4 and IPv6 one may be blocked, without a word. Raises OSError where one refuses, Silent
    where none says anything.
    """
    ways = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    refused: OSError | None = None
    for place, (family, kind, protocol, _, address) in enumerate(ways):
        parts = len(ways) - place + 1 if len(ways) > 1 else 1  # one more for the greeting
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that this host doesn't have
            refused = refused or error
            continue
        try:
            sock.settimeout(_left(deadline) / parts)
            sock.connect(address)
        except OSError as error:
            sock.close()
            refused = refused if isinstance(error, TimeoutError) else refused or error
        else:
            return sock
    raise refused or Silent("nothing answers")


def hear(
    sock: socket.socket, endpoint: Endpoint, claims: TypeAdapter[Model], deadline: float
) -> tuple[Model, Callable[[Reply], None]]:
    """A caller's claim, once it has proved itself, and how it is answered.

    Raises OSError or BadMessage where it has not.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = secrets.token_bytes(_NONCE)
    _send(sock, MAGIC + challenge, deadline)
    if _take(sock, len(MAGIC), deadline) != MAGIC:
        raise BadMessage("another protocol")
    nonce = _take(sock, _NONCE, deadline)
    said = _take_said(sock, deadline)
    proof = _take(sock, _PROOF, deadline)
    if not hmac.compare_digest(proof, endpoint.prove("caller", challenge, nonce, said)):
        raise BadMessage("another secret, or another run")
    if _has_gone(sock):  # it has called a second time meanwhile, or was ended
        raise ConnectionError("the caller has gone")

    def answer(words: Reply) -> None:
        payload = _clip(words).model_dump_json().encode()
        own = endpoint.prove("listener", nonce, challenge, payload)
        _send(sock, own + len(payload).to_bytes(_LENGTH, "big") + payload, deadline)

    try:
        return parse(claims, said), answer
    except BadMessage as error:
        with contextlib.suppress(OSError):
            answer(Reply(refused=str(error)))
        raise


def parse(messages: TypeAdapter[Model], payload: bytes) -> Model:
    """The model that the JSON is. Raises BadMessage, one line, where it is none."""
    try:
        return messages.validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadMessage(" ".join(f"no message of ours: {where} {first['msg']}".split())[:300]) from None


def _clip(answer: Reply) -> Reply:
    """Short enough for a greeting, whatever a character of it becomes in JSON."""
    return Reply(refused=answer.refused[:600]) if answer.refused else answer


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
