"""Control channel of the nodes other than node 0."""

from __future__ import annotations

import logging
import socket
import threading
import time

from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.rendezvous import Client, Goodbye
from launchers.gang.control import (
    MESSAGES,
    Control,
    Drain,
    End,
    Failed,
    FinalStep,
    GangMessage,
    GangRequest,
    Report,
    Start,
    Timeouts,
    Verdict,
    call_node_0,
    lost,
    short,
    why_lost,
)
from launchers.gang.failures import root_cause

_log = logging.getLogger(__name__)


class Member(Control):
    """Control for the nodes from 1 on."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        super().__init__(address, timeouts, start_step)
        self._client: Client | None = None
        self._started = threading.Event()
        self._port = 0
        self._hub_gone = False
        self._closed = False

    def join(self) -> int:
        address = self._address
        request = GangRequest(
            node=address.node, nodes=address.nodes, host=socket.gethostname(), start_step=self._start_step
        )
        connection = call_node_0(
            address, request, MESSAGES, limit_s=address.join_timeout_s, silence_s=self._timeouts.lost_after
        )
        _log.info("Rendezvous: connected to node 0 at %s", self._address.main_host)
        self._client = Client(connection, received=self._note_message, ended=self._note_end)
        # Node 0 ends the wait for all; this limit covers a node 0 that sends only heartbeats
        deadline = time.monotonic() + self._address.nodes * self._address.join_timeout_s
        while not self._started.wait(0.1):
            verdict = self.verdict()
            if verdict is not None and verdict.failure is not None:
                raise verdict.failure.error()
            if time.monotonic() > deadline + self._timeouts.lost_after:
                failure = lost(0, self._address.main_host, "it never started the gang")
                self.report(Failed(failure=failure))
                raise failure.error()
        return self._port

    def report(self, message: Report) -> None:
        if isinstance(message, Failed):
            with self._lock:
                self._note(message.failure)
            message = Failed(failure=short(message.failure))
        if self._client is not None:
            self._client.send(message)

    def last_step(self) -> int | None:
        with self._lock:
            return self._final_step

    def verdict(self) -> Verdict | None:
        with self._lock:
            if self._verdict is not None:
                return self._verdict
            if self._first_failure is None:
                return None
            # Node 0 decides; without it, this node's failures decide after a while
            wait = self._timeouts.settle * (1.0 if self._hub_gone else 2.0) + (
                0.0 if self._hub_gone else self._timeouts.lost_after
            )
            if time.monotonic() - self._first_failure >= wait:
                self._verdict = Verdict(root_cause(self._failures))
            return self._verdict

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._client is not None:
            self._client.close(Goodbye())

    def _note_end(self, error: Exception | None) -> None:
        reason = why_lost(error, self._timeouts.lost_after) if error else "it left"
        failure = lost(0, self._address.main_host, reason)
        with self._lock:
            self._hub_gone = True
            if self._closed or self._verdict is not None:
                return
            self._note(failure)
        if self._client is not None:  # a node 0 that was only silent must not continue alone
            self._client.send(Failed(failure=failure))

    def _note_message(self, message: GangMessage) -> None:
        if isinstance(message, Start):
            _log.info("Rendezvous complete: port %d", message.port)
            self._port = message.port
            self._started.set()
        elif isinstance(message, End):
            with self._lock:
                self._verdict = self._verdict or Verdict(message.failure)
        elif isinstance(message, Drain):
            with self._lock:
                self._drain_reason = message.failure
        elif isinstance(message, FinalStep):
            with self._lock:
                self._final_step = message.step
