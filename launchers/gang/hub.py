"""Node 0's end of the control channel: admits nodes, collects failures, decides the gang's outcome."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections import defaultdict

from estimator.errors import UserError
from launchers.cluster.endpoint import CLUSTER_PORTS, STORE_PORTS, NodeAddress
from launchers.cluster.listener import bind
from launchers.cluster.rendezvous import Goodbye, Peer, Server
from launchers.gang.control import (
    MESSAGES,
    Control,
    Done,
    Drain,
    End,
    Failed,
    FinalStep,
    GangMessage,
    GangRequest,
    PartStored,
    Report,
    Start,
    StepTimings,
    Stopped,
    Timeouts,
    Verdict,
    absent,
    format_nodes,
    lost,
    short,
    unexpected,
    why_lost,
)
from launchers.gang.failures import Failure, root_cause
from launchers.report.telemetry import StepTiming

_LOG_INTERVAL_S = 60.0
_LOCAL_STORE_PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports
_PORTS_TRIED = 200
_log = logging.getLogger(__name__)


class Hub(Control):
    """Control for node 0. With a single node no network is used."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        super().__init__(address, timeouts, start_step)
        self._hosts: dict[int, str] = {0: socket.gethostname()}
        self._last_joined = 0.0  # monotonic
        self._done: set[int] = set()
        self._parts: dict[int, set[int]] = defaultdict(set)
        self._timings: list[StepTiming] = []
        self._stopped: dict[int, Stopped] = {}
        self._first_stopped = 0.0  # monotonic
        # Lock order: the server's lock first, so that no call of it is made with self._lock held.
        self._server = Server(
            address.endpoint,
            GangRequest,
            MESSAGES,
            callers=address.nodes,
            silence_s=timeouts.lost_after,
            refuse=self._refuse,
            joined=self._note_joined,
            received=lambda peer, message: self._note_message(peer.request.node, message),
            lost=self._note_lost,
        )
        if address.nodes > 1:
            self._server.open()

    def join(self) -> int:
        start = logged = self._last_joined = time.monotonic()
        address = self._address
        with self._changed:
            while (missing := self._missing()) and not self._failures:
                now, joined = time.monotonic(), len(self._hosts)
                if now - self._last_joined >= address.join_timeout_s:
                    self._note(absent(missing, address.join_timeout_s, joined=joined, of=address.nodes))
                elif now - logged >= _LOG_INTERVAL_S:
                    logged = now
                    _log.warning(
                        "waiting for node %s: %d of %d have joined after %d min; "
                        "the wait ends %g min after the last join",
                        format_nodes(missing),
                        joined,
                        address.nodes,
                        round((now - start) / 60),
                        address.join_timeout_s / 60,
                    )
                self._changed.wait(0.2)
            failure = root_cause(self._failures) if self._failures else None
            self._verdict = Verdict(failure) if failure else None
        if failure is not None:
            self._server.send(End(failure=short(failure)))
            raise failure.error()
        port = free_port(self._address)
        _log.info("Rendezvous complete: %d nodes, port %d", self._address.nodes, port)
        self._server.send(Start(port=port))
        return port

    def report(self, message: Report) -> None:
        self._note_message(0, message)

    def step_timings(self) -> tuple[StepTiming, ...]:
        with self._lock:
            timings, self._timings = tuple(self._timings), []
        return timings

    def last_step(self) -> int | None:
        """Select and send the final step; None while nodes have not stopped and the settling time lasts."""
        with self._lock:
            if self._final_step is not None or not self._stopped:
                return self._final_step
            farthest = max(stopped.step for stopped in self._stopped.values())
            all_stopped = len(self._stopped) == self._address.nodes
            if all_stopped and all(stopped.all for stopped in self._stopped.values()):
                self._final_step = farthest
            elif time.monotonic() - self._first_stopped > self._timeouts.settle:
                # no rank can have finished that step (launchers.gang.leaving)
                self._final_step = farthest + 1
            last = self._final_step
        if last is not None:
            self._server.send(FinalStep(step=last))
        return last

    def verdict(self) -> Verdict | None:
        with self._lock:
            if self._verdict is not None:
                return self._verdict
            if self._failures:
                # With consequences only, wait longer for the report of the cause
                certain = any(not failure.secondary for failure in self._failures)
                is_single_node = self._address.nodes == 1 and certain
                wait = 0.0 if is_single_node else self._timeouts.settle * (1.0 if certain else 2.0)
                if self._first_failure is not None and time.monotonic() - self._first_failure >= wait:
                    self._verdict = Verdict(root_cause(self._failures))
            elif len(self._done) == self._address.nodes:
                self._verdict = Verdict(None)
            verdict = self._verdict
        if verdict is not None:
            self._server.send(End(failure=short(verdict.failure) if verdict.failure else None))
        return verdict

    def complete_steps(self) -> list[int]:
        with self._lock:
            complete = sorted(s for s, nodes in self._parts.items() if len(nodes) == self._address.nodes)
            for step in complete:
                del self._parts[step]
        return complete

    def peers_done(self) -> bool:
        with self._lock:
            uncommitted = any(len(nodes) == self._address.nodes for nodes in self._parts.values())
            return not uncommitted and self._done >= set(range(1, self._address.nodes))

    def parts_missing(self) -> bool:
        connected = bool(self._server.peers())
        with self._lock:
            return connected and bool(self._parts)

    def close(self) -> None:
        self._server.close(Goodbye())

    def _refuse(self, request: GangRequest) -> str | None:
        with self._lock:
            if 0 < request.node < self._address.nodes == request.nodes and request.node not in self._hosts:
                return None
        _log.info("Rendezvous: refused node %d of %d (%s)", request.node, request.nodes, request.host)
        return unexpected(request)

    def _note_joined(self, peer: Peer[GangRequest]) -> None:
        node, host, step = peer.request.node, peer.request.host, peer.request.start_step
        with self._changed:
            if step == self._start_step:
                self._hosts[node], self._last_joined = host, time.monotonic()
                _log.info("Rendezvous: node %d joined from %s", node, host)
                self._changed.notify_all()
                return
            text = f"node {node} ({host}) would resume from step {step}, node 0 from step {self._start_step}"
            failure = Failure.now("task", node, host, text)  # they restored different checkpoints
            self._note(failure)
        peer.connection.send(End(failure=failure))

    def _note_lost(self, peer: Peer[GangRequest], error: Exception) -> None:
        reason = why_lost(error, self._timeouts.lost_after)
        with self._lock:
            self._note(lost(peer.request.node, peer.request.host, reason))

    def _note_message(self, node: int, message: GangMessage) -> None:
        with self._lock:
            if isinstance(message, Failed):
                self._note(message.failure)
            elif isinstance(message, PartStored):
                self._parts[message.step].add(node)
            elif isinstance(message, StepTimings):
                self._timings += message.timings
            elif isinstance(message, Done):
                self._done.add(node)
            elif isinstance(message, Stopped):
                self._stopped[node] = message
                self._first_stopped = self._first_stopped or time.monotonic()
            elif isinstance(message, Drain):
                self._drain_reason = self._drain_reason or message.failure
                message = Drain(failure=self._drain_reason)
        if isinstance(message, Drain):
            self._server.send(message)

    def _missing(self) -> list[int]:
        """Return the nodes that have not joined; the caller holds the lock."""
        return sorted(set(range(self._address.nodes)) - set(self._hosts))


def free_port(address: NodeAddress) -> int:
    """Find a port for torch's store, below the kernel's range of ephemeral ports.

    On a cluster it is one of ``STORE_PORTS``, because a network policy opens no others.
    """
    candidates = STORE_PORTS if address.ports == CLUSTER_PORTS else _LOCAL_STORE_PORTS
    for port in random.SystemRandom().sample(candidates, min(len(candidates), _PORTS_TRIED)):
        if port not in address.ports:
            try:
                bind(address.main_host, port).close()
            except OSError:
                continue
            return port
    raise UserError(
        f"No free port between {candidates[0]} and {candidates[-1]} on this machine.",
        "End the processes that use them.",
    )
