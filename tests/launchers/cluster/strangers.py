"""Clients that know the address of a run but not its secret, and everything that they can try."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from launchers.cluster.endpoint import MAGIC, Endpoint, Secret

HALF_OPEN = 300  # more than are greeted at once
TRICKLES = 20
_CHALLENGE = len(MAGIC) + 32

Attack = Callable[[socket.socket], None]


def sends(data: bytes) -> Attack:
    """Send bytes at once and wait for the response."""

    def attack(sock: socket.socket) -> None:
        sock.sendall(data)
        while sock.recv(65_536):
            continue

    return attack


def completes_greeting(run: str, secret: str, claim: bytes, message: bytes) -> Attack:
    """Complete the greeting like a member and send a message."""

    def attack(sock: socket.socket) -> None:
        challenge = sock.recv(_CHALLENGE)[len(MAGIC) :]
        endpoint = Endpoint(host="", ports=(), secret=Secret(secret), run=run)
        proof = endpoint.prove("caller", challenge, b"n" * 32, claim)
        sock.sendall(MAGIC + b"n" * 32 + len(claim).to_bytes(4, "big") + claim + proof)
        sock.sendall(len(message).to_bytes(4, "big") + message)
        while sock.recv(65_536):
            continue

    return attack


def trickles(sock: socket.socket) -> None:
    """Send one byte every 0.2 s, forever."""
    for byte in iter(lambda: MAGIC[:1], b""):
        sock.sendall(byte)
        time.sleep(0.2)


def common() -> list[Attack]:
    """Return what can be sent without knowing the protocol of the run."""
    return [
        sends(b'{"node":Infinity,"nodes":2,"proof":"x"}\n'),
        sends(b"[" * 100_000),
        sends(b"GET / HTTP/1.1\r\n\r\n"),
        sends(MAGIC + b"n" * 32 + b"\xff\xff\xff\xff" + b"x" * 1_000_000),
        sends(MAGIC + b"n" * 32 + (10).to_bytes(4, "big") + b'{"node":1}' + b"p" * 32),
    ]


@contextlib.contextmanager
def repeated_attacks(
    ports: Sequence[int], attacks: Sequence[Attack], host: str = "127.0.0.1"
) -> Iterator[Callable[[], int]]:
    """Repeat all attacks next to half-open connections; yields the number of attempts."""
    stop = threading.Event()
    attempts = [0]
    idle: list[socket.socket] = []

    def call(port: int) -> socket.socket:
        sock = socket.create_connection((host, port), timeout=2)
        attempts[0] += 1
        return sock

    def one(attack: Attack) -> None:
        while not stop.is_set():
            for port in ports:
                with contextlib.suppress(OSError), contextlib.closing(call(port)) as sock:
                    attack(sock)
            stop.wait(0.1)

    def half_open() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                while len(idle) < HALF_OPEN and not stop.is_set():
                    idle.append(call(ports[0]))
            stop.wait(0.5)

    threads = [threading.Thread(target=one, args=(each,), daemon=True) for each in attacks]
    threads += [threading.Thread(target=one, args=(trickles,), daemon=True) for _ in range(TRICKLES)]
    threads.append(threading.Thread(target=half_open, daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield lambda: attempts[0]
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)
        for sock in idle:
            sock.close()


@contextlib.contextmanager
def forwarded_port(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield a port that forwards to another one, and a function that cuts all its connections."""
    pairs: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65_536):
                    target.sendall(data)
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = server.accept()
                    try:
                        far = socket.create_connection(("127.0.0.1", port), timeout=5)
                    except OSError:
                        near.close()
                        continue
                    far.settimeout(None)
                    pairs.extend((near, far))
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=carry, args=ends, daemon=True).start()

        def cut() -> None:
            for sock in pairs:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield int(server.getsockname()[1]), cut
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            cut()
