"""Node 0's end of the control channel: takes the nodes in, hears their failures, decides how it ends."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import defaultdict

from estimator.errors import UserError
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.listener import bind
from launchers.cluster.rendezvous import Goodbye, Peer, Server
from launchers.gang.control import (
    MESSAGES,
    Done,
    End,
    Failed,
    GangMessage,
    GangRequest,
    Go,
    Last,
    Leave,
    Paced,
    PartStored,
    Stopped,
    Timeouts,
    Verdict,
    absent,
    lost,
    short,
    some,
    unexpected,
    why_lost,
)
from launchers.gang.failures import Failure, root_cause
from launchers.report.telemetry import Pace

_TOLD_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class _Waited:
    """How long nodes have been waited for: in all, and since the last of them came."""

    def __init__(self, there: int) -> None:
        self._began = self._came = self._told = time.monotonic()
        self._there = there

    def look(self, there: int) -> None:
        if there > self._there:
            self._there, self._came = there, time.monotonic()

    @property
    def for_one_s(self) -> float:
        return time.monotonic() - self._came

    @property
    def minutes(self) -> int:
        return round((time.monotonic() - self._began) / 60)

    def is_to_be_told(self) -> bool:
        """Whether it is a minute since this was last so."""
        now = time.monotonic()
        if now - self._told < _TOLD_EVERY_S:
            return False
        self._told = now
        return True


class Hub:
    """Control for node 0. With one node there is no network at all."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        self._address = address
        self._start_step = start_step
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._joined = threading.Condition(self._lock)
        self._hosts: dict[int, str] = {0: socket.gethostname()}
        self._failures: list[Failure] = []
        self._first_failure: float | None = None  # monotonic
        self._done: set[int] = set()
        self._parts: dict[int, set[int]] = defaultdict(set)
        self._paces: list[Pace] = []
        self._leaving: Failure | None = None
        self._stopped: dict[int, Stopped] = {}
        self._first_stopped = 0.0  # monotonic
        self._last: int | None = None
        self._verdict: Verdict | None = None
        # Lock order: the server's lock first, so that no call of it is made with self._lock held.
        self._server = Server(
            address.endpoint,
            GangRequest,
            MESSAGES,
            callers=address.nodes,
            silence_s=timeouts.lost_after,
            refuse=self._refuse,
            joined=self._note_joined,
            received=self._note_message,
            lost=self._note_lost,
        )
        if address.nodes > 1:
            self._server.open()

    # -- Control ---------------------------------------------------------------------------------------

    def join(self) -> int:
        waited = _Waited(len(self._hosts))
        with self._joined:
            while self._missing() and not self._failures:
                self._joined.wait(0.2)
                waited.look(len(self._hosts))
                if not (missing := self._missing()):
                    break
                if waited.for_one_s >= self._address.patience_s:
                    joined, address = len(self._hosts), self._address
                    self._note(absent(missing, address.patience_s, joined=joined, of=address.nodes))
                elif waited.is_to_be_told():
                    _log.warning("%s", self._awaited(missing, waited))
            failure = root_cause(self._failures) if self._failures else None
            self._verdict = Verdict(failure) if failure else None
        if failure is not None:
            self._server.send(End(failure=short(failure)))
            raise failure.error()
        port = free_port(self._address)
        _log.info("Rendezvous complete: %d nodes, port %d", self._address.nodes, port)
        self._server.send(Go(port=port))
        return port

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._note(failure)

    def part_stored(self, step: int) -> None:
        with self._lock:
            self._parts[step].add(0)

    def paced(self, paces: tuple[Pace, ...]) -> None:
        with self._lock:
            self._paces += paces

    def paces(self) -> tuple[Pace, ...]:
        with self._lock:
            told, self._paces = tuple(self._paces), []
        return told

    def done(self) -> None:
        with self._lock:
            self._done.add(0)

    def leave(self, failure: Failure) -> None:
        with self._lock:
            self._leaving = leaving = self._leaving or failure
        self._server.send(Leave(failure=leaving))

    def leaving(self) -> Failure | None:
        with self._lock:
            return self._leaving

    def stopped(self, step: int, *, all_ranks: bool) -> None:
        with self._lock:
            self._note_stopped(0, Stopped(step=step, all=all_ranks))

    def last_step(self) -> int | None:
        with self._lock:
            if self._last is not None or not self._stopped:
                return self._last
            farthest = max(each.step for each in self._stopped.values())
            everyone = len(self._stopped) == self._address.nodes
            if everyone and all(each.all for each in self._stopped.values()):
                self._last = farthest
            elif time.monotonic() - self._first_stopped > self._timeouts.settle:
                self._last = farthest + 1  # the others can't have ended that one (launchers.gang.leaving)
            last = self._last
        if last is not None:
            self._server.send(Last(step=last))
        return last

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
            self._server.send(End(failure=short(verdict.failure) if verdict.failure else None))
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
        others = bool(self._server.peers())
        with self._lock:
            return others and bool(self._parts)

    def close(self) -> None:
        self._server.close(Goodbye())

    # -- callbacks of the server ------------------------------------------------------------------------

    def _refuse(self, request: GangRequest) -> str | None:
        with self._lock:
            if 0 < request.node < self._address.nodes == request.nodes and request.node not in self._hosts:
                return None
        _log.info("Rendezvous: refused node %d of %d (%s)", request.node, request.nodes, request.host)
        return unexpected(request)

    def _note_joined(self, peer: Peer[GangRequest]) -> None:
        node, host, step = peer.request.node, peer.request.host, peer.request.start_step
        with self._joined:
            if step == self._start_step:
                self._hosts[node] = host
                _log.info("Rendezvous: node %d joined from %s", node, host)
                self._joined.notify_all()
                return
            failure = self._disagree(node, host, step)  # they restored different checkpoints
            self._note(failure)
        peer.connection.send(End(failure=failure))

    def _note_lost(self, peer: Peer[GangRequest], error: Exception) -> None:
        why = why_lost(error, self._timeouts.lost_after)
        with self._lock:
            self._note(lost(peer.request.node, peer.request.host, why))

    def _note_message(self, peer: Peer[GangRequest], message: GangMessage) -> None:
        node = peer.request.node
        with self._lock:
            if isinstance(message, Failed):
                self._note(message.failure)
            elif isinstance(message, PartStored):
                self._parts[message.step].add(node)
            elif isinstance(message, Paced):
                self._paces += message.paces
            elif isinstance(message, Done):
                self._done.add(node)
            elif isinstance(message, Stopped):
                self._note_stopped(node, message)
        if isinstance(message, Leave):
            self.leave(message.failure)

    # -- shared ----------------------------------------------------------------------------------------

    def _note(self, failure: Failure) -> None:
        """Add a failure; the caller holds the lock."""
        _log.info("Gang failure on node %d (%s): %s", failure.node, failure.kind, failure.message)
        self._failures.append(failure)
        self._first_failure = self._first_failure or time.monotonic()
        self._joined.notify_all()

    def _note_stopped(self, node: int, message: Stopped) -> None:
        """Note how far a node's ranks have come; the caller holds the lock."""
        self._stopped[node] = message
        self._first_stopped = self._first_stopped or time.monotonic()

    def _missing(self) -> list[int]:
        """The nodes that have not come; the caller holds the lock."""
        return sorted(set(range(self._address.nodes)) - set(self._hosts))

    def _awaited(self, missing: list[int], waited: _Waited) -> str:
        address = self._address
        return (
            f"waiting for node {some(missing)}: {len(self._hosts)} of {address.nodes} are there after "
            f"{waited.minutes} min; the wait ends {address.patience_s / 60:g} min after the last that came"
        )

    def _disagree(self, node: int, host: str, step: int) -> Failure:
        return Failure(
            kind="task",
            node=node,
            host=host,
            at=time.time(),
            message=f"node {node} ({host}) would go on from step {step}, node 0 from step {self._start_step}",
        )


def free_port(address: NodeAddress) -> int:
    """A port for torch's store, below the range from which the kernel gives ports to anybody."""
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        if port not in address.ports:
            try:
                bind(address.main_host, port).close()
            except OSError:
                continue
            return port
    raise UserError("No free port between 20000 and 31999 on this machine.", "End what holds them.")
