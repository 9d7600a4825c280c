"""Mutual authentication of two processes of one run, before either interprets data from the other.

The whole greeting has one time limit::

    listener -> caller   magic, nonce                                   sent before anything is read
    caller -> listener   magic, nonce, length, request, proof           at most 4 KB; identifies the caller
    listener -> caller   proof, length, reply                           admission, or reason of the refusal

A proof is HMAC-SHA256 over the role, both nonces and the payload (:meth:`Endpoint.prove`). Its key is derived
from the secret and the run's name (run, step, attempt, purpose): a recorded or reflected greeting, or one of
another attempt, proves nothing. A request is parsed only after its proof was verified.
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

GREETING_S = 5.0  # time limit of a greeting
_NONCE = 32
_PROOF = 32
_MAX_PAYLOAD = 3_900  # bytes of a request or a reply: a greeting stays below 4 KB
_LENGTH = 4

Model = TypeVar("Model", bound=BaseModel)


class BadMessage(ValueError):  # noqa: N818 named for the event
    """Received data is not a valid message; the text is one line."""


class Refused(Exception):  # noqa: N818 named for the event
    """The authenticated listener refuses this caller; the text is the reason."""


class Silent(Exception):  # noqa: N818 named for the event
    """A host's port does not respond."""


class Message(BaseModel):
    """Base of messages and requests: the receiver validates fields, and refuses unknown ones."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Reply(Message):
    """The listener's reply at the end of a greeting."""

    refused: str | None = None  # reason of the refusal; None: admitted


def call(endpoint: Endpoint, port: int, request: BaseModel, deadline: float) -> socket.socket:
    """Connect and greet the listener. Raises OSError or BadMessage unless it belongs to this run."""
    sock = _connect(endpoint.host, port, deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _take(sock, len(MAGIC), deadline) != MAGIC:
            raise BadMessage("something else listens there")
        challenge = _take(sock, _NONCE, deadline)
        nonce = secrets.token_bytes(_NONCE)
        payload = request.model_dump_json().encode()
        if len(payload) > _MAX_PAYLOAD:
            raise ValueError(f"a request of {len(payload):,} bytes, more than the limit of {_MAX_PAYLOAD:,}")
        own_proof = endpoint.prove("caller", challenge, nonce, payload)
        _send(
            sock,
            MAGIC + nonce + len(payload).to_bytes(_LENGTH, "big") + payload + own_proof,
            deadline,
        )
        try:
            proof = _take(sock, _PROOF, deadline)
        except ConnectionError:
            raise BadMessage("another run listens there, or one with another secret") from None
        response = _take_payload(sock, deadline)
        if not hmac.compare_digest(proof, endpoint.prove("listener", nonce, challenge, response)):
            raise BadMessage("the listener does not know the secret")
        reply = parse(TypeAdapter(Reply), response)
        if reply.refused is not None:
            raise Refused(reply.refused)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first of the host's addresses that responds; each gets a share of the time.

    On a host with IPv4 and IPv6 one of them may be blocked silently. Raises OSError if an address refuses,
    Silent if none responds.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    refused: OSError | None = None
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        shares = len(addresses) - index + 1 if len(addresses) > 1 else 1  # one more share for the greeting
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # an address family that this host does not support
            refused = refused or error
            continue
        try:
            sock.settimeout(_remaining(deadline) / shares)
            sock.connect(address)
        except OSError as error:
            sock.close()
            refused = refused if isinstance(error, TimeoutError) else refused or error
        else:
            return sock
    raise refused or Silent("nothing answers")


def authenticate(
    sock: socket.socket, endpoint: Endpoint, requests: TypeAdapter[Model], deadline: float
) -> tuple[Model, Callable[[str | None], None]]:
    """Verify a caller's proof; return its request, and a function that accepts (None) or refuses it.

    Raises OSError or BadMessage if the proof fails.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = secrets.token_bytes(_NONCE)
    _send(sock, MAGIC + challenge, deadline)
    if _take(sock, len(MAGIC), deadline) != MAGIC:
        raise BadMessage("another protocol")
    nonce = _take(sock, _NONCE, deadline)
    payload = _take_payload(sock, deadline)
    proof = _take(sock, _PROOF, deadline)
    if not hmac.compare_digest(proof, endpoint.prove("caller", challenge, nonce, payload)):
        raise BadMessage("another secret, or another run")
    if _has_disconnected(sock):  # it has retried meanwhile, or was ended
        raise ConnectionError("the caller has disconnected")

    def reply(refused: str | None) -> None:
        # Shortened to fit into a greeting, whatever its characters become in JSON
        payload = Reply(refused=refused and refused[:600]).model_dump_json().encode()
        own_proof = endpoint.prove("listener", nonce, challenge, payload)
        _send(sock, own_proof + len(payload).to_bytes(_LENGTH, "big") + payload, deadline)

    try:
        return parse(requests, payload), reply
    except BadMessage as error:
        with contextlib.suppress(OSError):
            reply(str(error))
        raise


def parse(messages: TypeAdapter[Model], payload: bytes) -> Model:
    """Parse JSON to a model. Raises BadMessage with a one-line text."""
    try:
        return messages.validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadMessage(" ".join(f"not of this protocol: {field} {first['msg']}".split())[:300]) from None


def _take_payload(sock: socket.socket, deadline: float) -> bytes:
    length = int.from_bytes(_take(sock, _LENGTH, deadline), "big")
    if length > _MAX_PAYLOAD:
        raise BadMessage("a greeting that is too long")
    return _take(sock, length, deadline)


def _take(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly ``count`` bytes before the deadline, however slowly they arrive."""
    received = b""
    while len(received) < count:
        sock.settimeout(_remaining(deadline))
        data = sock.recv(count - len(received))
        if not data:
            raise ConnectionError("connection closed")
        received += data
    return received


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_remaining(deadline))
    sock.sendall(data)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the greeting was not completed in time")
    return remaining


def _has_disconnected(sock: socket.socket) -> bool:
    """Whether the caller has closed the connection, or has sent more than its part."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    return True
