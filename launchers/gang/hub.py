"""Node 0's end of the control channel: takes the nodes in, hears their failures, decides how it ends."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import defaultdict

from estimator.errors import UserError
from launchers.cluster.channel import Connection, Heartbeat
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.listener import Guest, Listener, bind
from launchers.gang.control import (
    MESSAGES,
    Beat,
    Bye,
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
        self._members: dict[int, Connection[GangMessage]] = {}
        self._hosts: dict[int, str] = {0: socket.gethostname()}
        self._left: set[int] = set()
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
        self._closed = False
        self._listener: Listener[GangRequest] | None = None
        self._heartbeat: Heartbeat | None = None
        if address.nodes > 1:
            self._listener = Listener(address.endpoint, GangRequest, self._serve, callers=address.nodes)
            self._heartbeat = Heartbeat(lambda: self._tell(Beat()))

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
            self._tell(End(failure=short(failure)))
            raise failure.error()
        port = free_port(self._address)
        _log.info("Rendezvous complete: %d nodes, port %d", self._address.nodes, port)
        self._tell(Go(port=port))
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
        self._tell(Leave(failure=leaving))

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
            self._tell(Last(step=last))
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
            self._tell(End(failure=short(verdict.failure) if verdict.failure else None))
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
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for member in members:
            member.send(Bye())
            member.close()
        if self._listener is not None:
            self._listener.close()

    # -- threads ---------------------------------------------------------------------------------------

    def _serve(self, guest: Guest[GangRequest]) -> None:
        """Hear one node out, in a thread of its own."""
        node = guest.claim.node
        member = self._take_in(guest)
        if member is None:
            return
        try:
            while not isinstance(message := member.receive(), Bye):
                self._note_message(node, message)
        except (OSError, ValueError) as error:
            with self._lock:
                if not self._closed:
                    self._note(lost(node, self._hosts[node], why_lost(error, self._timeouts.lost_after)))
        with self._lock:
            self._left.add(node)
        member.close()

    def _take_in(self, guest: Guest[GangRequest]) -> Connection[GangMessage] | None:
        """Take a node in; None when it is not expected."""
        claim = guest.claim
        node, nodes = claim.node, self._address.nodes
        with self._joined:
            if claim.nodes != nodes or not 0 < node < nodes or node in self._hosts:
                _log.info("Rendezvous: refused node %d of %d (%s)", node, claim.nodes, claim.host)
                guest.refuse(unexpected(claim))
                return None
            try:
                member = guest.accept(MESSAGES, silence_s=self._timeouts.lost_after)
            except OSError:  # it has gone, and tries again
                return None
            agrees = claim.start_step == self._start_step
            if agrees:
                self._hosts[node] = claim.host
                self._members[node] = member
                _log.info("Rendezvous: node %d joined from %s", node, claim.host)
                self._joined.notify_all()
            else:  # they restored different checkpoints
                self._note(self._disagree(node, claim.host, claim.start_step))
                member.send(End(failure=self._failures[-1]))
        if agrees:
            return member
        member.finish()
        with contextlib.suppress(OSError, ValueError), contextlib.closing(member):
            while not isinstance(member.receive(), Bye):
                continue  # until it has read why
        return None

    def _note_message(self, node: int, message: GangMessage) -> None:
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

    def _tell(self, message: GangMessage) -> None:
        with self._lock:
            members = [member for node, member in self._members.items() if node not in self._left]
        for member in members:
            member.send(message)

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
