"""The channel between the processes of a run: members with the secret connect, others are refused."""

from __future__ import annotations

import contextlib
import pickle
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter

from launchers.cluster import channel, listener
from launchers.cluster.channel import Connection, Unreachable, connect
from launchers.cluster.endpoint import MAGIC, Endpoint, NodeAddress, Secret, choose_ports, unused_port
from launchers.cluster.greeting import BadMessage, Message, Refused, parse
from launchers.cluster.listener import Caller, Listener

ROOT = Path(__file__).parents[3]
CHALLENGE = len(MAGIC) + 32  # bytes that a listener sends to whoever calls


class Claim(Message):
    name: int


class Text(Message):
    kind: Literal["text"] = "text"
    number: float


TEXTS: TypeAdapter[Any] = TypeAdapter(Text)


def endpoint(port: int | None = None, **changes: Any) -> Endpoint:
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "ports": (port or unused_port(),),
        "secret": Secret("s"),
        "run": "r",
    }
    return Endpoint(**{**values, **changes})


class Main:
    """A listener that accepts callers with the secret, unless their name is negative."""

    def __init__(self, address: Endpoint) -> None:
        self.where = address
        self.members: queue.Queue[tuple[int, Connection[Any]]] = queue.Queue()
        self.listener = Listener(address, Claim, self.serve, callers=2048)

    def serve(self, caller: Caller[Claim]) -> None:
        if caller.request.name < 0:
            caller.refuse("negative")
        else:
            self.members.put((caller.request.name, caller.accept(TEXTS, silence_s=10.0)))

    def close(self) -> None:
        self.listener.close()
        while not self.members.empty():
            self.members.get()[1].close()


@pytest.fixture
def main() -> Iterator[Main]:
    with contextlib.closing(Main(endpoint())) as main_process:
        yield main_process


def call(address: Endpoint, name: int = 1, limit_s: float = 10.0) -> Connection[Any]:
    return connect(address, Claim(name=name), TEXTS, limit_s=limit_s, silence_s=10.0)


def connect_without_secret(main: Main) -> socket.socket:
    return socket.create_connection(("127.0.0.1", main.where.ports[0]), timeout=10)


def ended(sock: socket.socket, within_s: float = 10.0) -> float:
    """Return the seconds until the other end has closed."""
    begin = time.monotonic()
    sock.settimeout(within_s)
    with contextlib.suppress(ConnectionError):
        while sock.recv(65_536):
            continue
    return time.monotonic() - begin


def exchange_seconds(main: Main, name: int = 1) -> float:
    """Return the seconds in which a caller with the secret exchanges messages both ways."""
    begin = time.monotonic()
    mine = call(main.where, name)
    who, theirs = main.members.get(timeout=10)
    assert who == name
    for sender, receiver in ((mine, theirs), (theirs, mine)):
        assert sender.send(Text(number=2.5))
        assert receiver.receive() == Text(number=2.5)
    mine.close()
    with pytest.raises(ConnectionError):
        theirs.receive()
    theirs.close()
    return time.monotonic() - begin


def greeting(address: Endpoint, challenge: bytes, claim: bytes, *, role: str = "caller") -> bytes:
    """Return the greeting of a caller with the secret."""
    nonce = b"n" * 32
    proof = address.prove(role, challenge[len(MAGIC) :], nonce, claim)
    return MAGIC + nonce + len(claim).to_bytes(4, "big") + claim + proof


def test_a_caller_with_the_secret_is_accepted_and_messages_go_both_ways(main: Main) -> None:
    assert exchange_seconds(main) < 5


@pytest.mark.parametrize("differs", [{"secret": Secret("other")}, {"secret": Secret("")}, {"run": "r/1"}])
def test_a_caller_with_another_secret_or_of_another_run_is_refused(
    main: Main, differs: dict[str, Any]
) -> None:
    with pytest.raises(Unreachable, match="another run listens there, or one with another secret"):
        call(endpoint(main.where.ports[0], **differs), limit_s=0.5)
    assert main.members.empty()
    exchange_seconds(main)


def test_a_caller_rejects_a_listener_that_does_not_know_the_secret() -> None:
    """The listener sends back the proof of the caller, which belongs to the other role."""
    address = endpoint()
    with socket.create_server(("127.0.0.1", address.ports[0])) as listener:

        def mirror() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(MAGIC + b"c" * 32)
                greeting_bytes = sock.recv(4096)
                claim = greeting_bytes[len(MAGIC) + 36 : -32]
                sock.sendall(greeting_bytes[-32:] + len(claim).to_bytes(4, "big") + claim)
                ended(sock)

        threading.Thread(target=mirror, daemon=True).start()
        with pytest.raises(Unreachable, match="does not know the secret"):
            call(address, limit_s=0.0)


def test_a_replayed_greeting_is_refused(main: Main) -> None:
    with connect_without_secret(main) as first:
        recorded = greeting(main.where, first.recv(CHALLENGE), b'{"name":7}')
        first.sendall(recorded)
        assert first.recv(4096), "the first time it is taken in"
        assert main.members.get(timeout=5)[0] == 7
    with connect_without_secret(main) as second_socket:
        second_socket.recv(CHALLENGE)
        second_socket.sendall(recorded)
        assert ended(second_socket) < 2
    assert main.members.empty()


def test_a_greeting_whose_name_was_changed_after_signing_is_refused(main: Main) -> None:
    with connect_without_secret(main) as sock:
        signed_greeting = greeting(main.where, sock.recv(CHALLENGE), b'{"name":7}')
        sock.sendall(signed_greeting.replace(b'{"name":7}', b'{"name":8}'))
        assert ended(sock) < 2
    assert main.members.empty()


BEFORE_THE_PROOF = {
    "infinity": b'{"node":Infinity,"nodes":2,"proof":"x"}\n',
    "nested": b"[" * 100_000,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nothing and gone": b"",
    "long": MAGIC + b"n" * 32 + b"\xff\xff\xff\xff" + b"x" * 1_000_000,
    "wrong proof": MAGIC + b"n" * 32 + (10).to_bytes(4, "big") + b'{"name":7}' + b"p" * 32,
    "a pickle": MAGIC + b"n" * 32 + (20).to_bytes(4, "big") + b"cos\nsystem\n(S'true'\n" + b"p" * 32,
}


@pytest.mark.parametrize("expected", BEFORE_THE_PROOF.values(), ids=BEFORE_THE_PROOF)
def test_unauthenticated_messages_are_neither_read_nor_answered(main: Main, expected: bytes) -> None:
    with connect_without_secret(main) as sock:
        with contextlib.suppress(OSError):  # it may have hung up already
            sock.sendall(expected)
            sock.shutdown(socket.SHUT_WR)
        assert ended(sock) < 2
    assert main.members.empty()
    assert exchange_seconds(main) < 5


def test_a_greeting_sent_byte_by_byte_times_out_and_delays_no_other_caller(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 1.5)
    with connect_without_secret(main) as sock:
        signed_greeting = greeting(main.where, sock.recv(CHALLENGE), b'{"name":7}')
        begin = time.monotonic()
        assert exchange_seconds(main) < 1.5, "others are greeted beside it"
        with contextlib.suppress(OSError):
            for byte in signed_greeting:
                sock.sendall(bytes([byte]))
                time.sleep(0.1)
        assert 1.0 < time.monotonic() - begin < 4.0
    assert main.members.empty()


NO_MESSAGES = {
    "infinity": b'{"kind":"text","number":Infinity}',
    "nested": b"[" * 100_000,
    "missing": b'{"kind":"text"}',
    "type": b'{"kind":"text","number":"1"}',
    "unknown": b'{"kind":"text","number":1,"more":1}',
    "no JSON": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("payload", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_an_invalid_message_is_reported_in_one_line(payload: bytes) -> None:
    with pytest.raises(BadMessage, match=r"^not of this protocol") as caught:
        parse(TEXTS, payload)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


def test_an_invalid_join_request_with_the_right_secret_is_refused_in_one_line(main: Main) -> None:
    with connect_without_secret(main) as sock:
        sock.sendall(greeting(main.where, sock.recv(CHALLENGE), b'{"name":"7"}'))
        assert b'"refused":"not of this protocol' in sock.recv(4096)
        assert ended(sock) < 2
    assert exchange_seconds(main) < 5


def test_a_message_that_is_too_long_is_not_read(main: Main) -> None:
    with connect_without_secret(main) as sock:
        sock.sendall(greeting(main.where, sock.recv(CHALLENGE), b'{"name":7}'))
        _, member = main.members.get(timeout=5)
        sock.sendall((listener.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(BadMessage, match="4,194,305 bytes"):
            member.receive()
        member.close()


def test_a_refused_caller_receives_the_reason(main: Main) -> None:
    with pytest.raises(Refused, match="negative"):
        call(main.where, -1)


def test_a_caller_that_closes_its_connection_before_it_is_accepted_does_not_join(main: Main) -> None:
    with connect_without_secret(main) as sock:
        sock.sendall(greeting(main.where, sock.recv(CHALLENGE), b'{"name":7}'))
        sock.close()
    time.sleep(0.5)
    while not main.members.empty():  # its answer may have been on the way; then its end is seen at once
        _, member = main.members.get()
        with pytest.raises(OSError, match=r"closed|reset"):
            member.receive()
    exchange_seconds(main)


def test_a_member_that_was_disconnected_may_join_again(main: Main) -> None:
    for _ in range(3):
        exchange_seconds(main, name=5)


def test_ports_in_use_by_other_programs_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "GREETING_S", 1.0)
    ports = choose_ports(local=True)[:3]
    with (
        socket.create_server(("127.0.0.1", ports[0])),  # takes calls and says nothing
        contextlib.closing(Main(endpoint(ports[1], secret=Secret("other")))),
        contextlib.closing(Main(endpoint(ports=ports))) as mine,
    ):
        assert mine.listener._socket.getsockname()[1] == ports[2]
        assert 1.0 <= exchange_seconds(mine) < 4.0


def test_a_listener_on_the_ipv6_loopback_address_accepts_callers() -> None:
    address = endpoint(host="::1")
    with contextlib.closing(Main(address)) as main:
        assert main.listener._socket.getsockname()[0] == "::1"
        assert exchange_seconds(main) < 5


def test_a_host_is_reached_at_its_second_address_if_the_first_does_not_answer(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = main.where.ports[0]
    with contextlib.ExitStack() as held:
        silent = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # its queue is full: who comes now hears nothing
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        way = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        ways = [(*way, silent.getsockname()), (*way, ("127.0.0.1", port))]
        monkeypatch.setattr("launchers.cluster.greeting.socket.getaddrinfo", lambda *_, **__: ways)
        begin = time.monotonic()
        call(main.where).close()
    assert 1 < time.monotonic() - begin < 5


def test_a_listener_on_a_loopback_address_accepts_connections_at_that_address_only(main: Main) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", main.where.ports[0]), timeout=2)
    port = unused_port()
    everywhere = endpoint(port, host="0.0.0.0")  # noqa: S104 - a host name's place is taken
    with contextlib.closing(Main(everywhere)):
        for host in ("127.0.0.2", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.2",):
            socket.create_connection((host, port), timeout=2).close()


def serve(port: int) -> None:
    """Accept greetings until the process is killed."""
    main = Main(endpoint(port))
    print("listens", flush=True)
    connections = []
    while True:
        connections.append(main.members.get()[1])
        connections[-1].send(Text(number=1))


def test_a_listener_recovers_from_more_half_open_connections_than_file_descriptors(tmp_path: Path) -> None:
    descriptors, connections = 100, 300
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 3000:
        pytest.skip(f"only {hard} open files are allowed here")
    listener._allow_descriptors(3000)
    address = endpoint()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *("prlimit", f"--nofile={descriptors}:{descriptors}"),
                *(sys.executable, "-c", f"from {__name__} import serve; serve({address.ports[0]})"),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    half_open = []
    try:
        assert process.stdout.readline() == b"listens\n"
        for _ in range(connections):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", address.ports[0]))
            half_open.append(sock)
        time.sleep(1)
        begin = time.monotonic()
        member = call(address, limit_s=60)
        assert member.receive() == Text(number=1)
        waited = time.monotonic() - begin
        for sock in half_open:
            sock.close()
        begin = time.monotonic()
        other = call(address, 2, limit_s=60)
        assert other.receive() == Text(number=1)
        after = time.monotonic() - begin
        assert waited < 45
        assert after < 10
        member.close()
        other.close()
    finally:
        for sock in half_open:
            sock.close()
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert (tmp_path / "log").read_text() == ""


def test_the_secret_is_random_and_is_never_printed() -> None:
    secret = Secret.make()
    assert len(bytes.fromhex(secret.text)) == 32
    assert secret != Secret.make()
    address = NodeAddress(node=0, nodes=2, main_host="h", ports=(1,), secret=secret, run="r")
    for text in (repr(secret), str(secret), repr(address), repr(address.endpoint)):
        assert secret.text not in text
    assert pickle.loads(pickle.dumps(secret)) == secret  # noqa: S301 - our own
    with pytest.raises(ValueError, match="more than one node must have one"):
        NodeAddress(node=0, nodes=2, main_host="h", ports=(1,), secret=Secret(""), run="r")
