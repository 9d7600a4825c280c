"""Node 0's end of the control channel: takes the nodes in, hears their failures, decides how it ends."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
import time
from collections import defaultdict

from estimator.errors import UserError
from launchers.cluster.channel import NodeAddress
from launchers.cluster.processes import is_loopback
from launchers.gang.control import HANDSHAKE_S, Heart, Line, Message, Timeouts, Verdict, lost, proof, why_lost
from launchers.gang.failures import Failure, root_cause


class Hub:
    """Control for node 0. With one node there is no network at all."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        self._address = address
        self._start_step = start_step
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._joined = threading.Condition(self._lock)
        self._members: dict[int, Line] = {}
        self._hosts: dict[int, str] = {0: socket.gethostname()}
        self._left: set[int] = set()
        self._failures: list[Failure] = []
        self._first_failure: float | None = None  # monotonic
        self._done: set[int] = set()
        self._parts: dict[int, set[int]] = defaultdict(set)
        self._verdict: Verdict | None = None
        self._closed = False
        self._listener = listen(address) if address.nodes > 1 else None
        self._heart: Heart | None = None
        if self._listener is not None:
            threading.Thread(target=self._accept, name="gang-accept", daemon=True).start()
            self._heart = Heart(self._beat)

    # -- Control ---------------------------------------------------------------------------------------

    def join(self) -> int:
        deadline = time.monotonic() + self._timeouts.rendezvous
        with self._joined:
            while len(self._hosts) < self._address.nodes and not self._failures:
                self._joined.wait(0.2)
                if len(self._hosts) < self._address.nodes and time.monotonic() >= deadline:
                    self._note(self._missing())
            failure = root_cause(self._failures) if self._failures else None
            self._verdict = Verdict(failure) if failure else None
        if failure is not None:
            self._tell({"kind": "verdict", "failure": failure.to_dict()})
            raise failure.error()
        port = free_port(self._address)
        self._tell({"kind": "go", "port": port})
        return port

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._note(failure)

    def part_stored(self, step: int) -> None:
        with self._lock:
            self._parts[step].add(0)

    def done(self) -> None:
        with self._lock:
            self._done.add(0)

    def verdict(self) -> Verdict | None:
        with self._lock:
            if self._verdict is not None:
                return self._verdict
            if self._failures:
                # Consequences alone: give the cause a little longer to be told.
                certain = any(not failure.secondary for failure in self._failures)
                alone = self._address.nodes == 1 and certain
                wait = 0.0 if alone else self._timeouts.settle * (1.0 if certain else 2.0)
                if self._first_failure is not None and time.monotonic() - self._first_failure >= wait:
                    self._verdict = Verdict(root_cause(self._failures))
            elif len(self._done) == self._address.nodes:
                self._verdict = Verdict(None)
            verdict = self._verdict
        if verdict is not None:
            failure = verdict.failure
            self._tell({"kind": "verdict", "failure": failure.to_dict() if failure else None})
        return verdict

    def whole_steps(self) -> list[int]:
        with self._lock:
            whole = sorted(s for s, nodes in self._parts.items() if len(nodes) == self._address.nodes)
            for step in whole:
                del self._parts[step]
        return whole

    def others_done(self) -> bool:
        with self._lock:
            uncommitted = any(len(nodes) == self._address.nodes for nodes in self._parts.values())
            return not uncommitted and self._done >= set(range(1, self._address.nodes))

    def parts_missing(self) -> bool:
        with self._lock:
            return bool(self._parts) and bool(set(self._members) - self._left)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            members = list(self._members.values())
        if self._heart is not None:
            self._heart.stop()
        for member in members:
            member.send({"kind": "bye"})
            member.close()
        if self._listener is not None:
            # close() alone would leave the thread in accept(), and with it the port.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    # -- threads ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()  # type: ignore[union-attr]
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="gang-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection, HANDSHAKE_S)
        try:
            node = self._greet(line)
        except (OSError, ValueError, KeyError, TypeError):
            node = None
        if node is None:
            line.close()
            return
        line.patience(self._timeouts.lost_after)
        try:
            while (message := line.receive())["kind"] != "bye":
                self._heard(node, message)
        except (OSError, ValueError, KeyError, TypeError) as error:
            with self._lock:
                if not self._closed:
                    self._note(lost(node, self._hosts[node], why_lost(error, self._timeouts.lost_after)))
        with self._lock:
            self._left.add(node)
        line.close()

    def _greet(self, line: Line) -> int | None:
        """Take a node in; None when it is not one of ours."""
        hello = challenge(line, self._address.token)
        if hello is None:
            return None
        node, nodes = int(hello["node"]), int(hello["nodes"])
        with self._joined:
            if nodes != self._address.nodes or not 0 < node < nodes or node in self._hosts:
                line.send({"kind": "refused", "why": f"node {node} of {nodes} is not expected (any more)"})
                return None
            if hello["start_step"] != self._start_step:  # they restored different checkpoints
                self._note(self._disagree(node, str(hello["host"]), hello["start_step"]))
                line.send({"kind": "verdict", "failure": self._failures[-1].to_dict()})
                return None
            self._hosts[node] = str(hello["host"])
            self._members[node] = line
            line.send({"kind": "welcome", "proof": proof(self._address.token, "hub", hello["nonce"])})
            self._joined.notify_all()
        return node

    def _heard(self, node: int, message: Message) -> None:
        with self._lock:
            if message["kind"] == "failed":
                self._note(Failure.from_dict(message["failure"]))
            elif message["kind"] == "part":
                self._parts[int(message["step"])].add(node)
            elif message["kind"] == "done":
                self._done.add(node)

    def _beat(self) -> None:
        self._tell({"kind": "beat"})

    # -- shared ----------------------------------------------------------------------------------------

    def _note(self, failure: Failure) -> None:
        """With the lock held."""
        self._failures.append(failure)
        self._first_failure = self._first_failure or time.monotonic()
        self._joined.notify_all()

    def _tell(self, message: Message) -> None:
        with self._lock:
            members = [line for node, line in self._members.items() if node not in self._left]
        for member in members:
            member.send(message)

    def _missing(self) -> Failure:
        missing = sorted(set(range(self._address.nodes)) - set(self._hosts))
        return Failure(
            kind="node",
            node=missing[0],
            host="?",
            at=time.time(),
            message=f"node {', '.join(map(str, missing))} did not come within "
            f"{self._timeouts.rendezvous:g} s ({len(self._hosts)} of {self._address.nodes} were there)",
        )

    def _disagree(self, node: int, host: str, step: int) -> Failure:
        return Failure(
            kind="task",
            node=node,
            host=host,
            at=time.time(),
            message=f"node {node} ({host}) would go on from step {step}, node 0 from step {self._start_step}",
        )


def challenge(line: Line, token: str) -> Message | None:
    """What a node says of itself, once it has proved that it knows the token; None: refused."""
    nonce = secrets.token_hex(16)
    line.send({"kind": "challenge", "nonce": nonce})
    hello = line.receive()
    node, nodes = int(hello["node"]), int(hello["nodes"])
    if hmac_equal(str(hello["proof"]), proof(token, f"member {node} of {nodes}", nonce)):
        return hello
    line.send({"kind": "refused", "why": "token"})
    return None


def hmac_equal(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())


def free_port(address: NodeAddress) -> int:
    """A port for torch's store, below the range from which the kernel gives ports to anybody."""
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        if port not in address.ports:
            try:
                _bind(address, port).close()
            except OSError:
                continue
            return port
    raise UserError("No free port between 20000 and 31999 on this machine.", "End what holds them.")


def listen(address: NodeAddress) -> socket.socket:
    """Node 0's end, on the first of its ports that is free; UserError where none is."""
    problems = []
    for port in address.ports:
        try:
            listener = _bind(address, port)
        except OSError as error:
            problems.append(f"{port}: {error.strerror}")
            continue
        listener.listen(1024)
        return listener
    raise UserError(
        f"Node 0 can't listen on any of its control ports ({'; '.join(problems)}).",
        "End what holds them, or give other ports.",
    )


def _bind(address: NodeAddress, port: int) -> socket.socket:
    if is_loopback(address.main_host):
        family = socket.AF_INET6 if ":" in address.main_host else socket.AF_INET
        return _bound(family, address.main_host, port)
    if socket.has_dualstack_ipv6():
        try:
            return _bound(socket.AF_INET6, "", port)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):  # IPv4 alone would not help
                raise
    return _bound(socket.AF_INET, "", port)


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
