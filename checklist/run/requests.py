"""Requests to workers. Each ends in bounded time; a failure is attributed to ranks.

A request ends when all ranks have responded, soon after a failure of a rank that the others need, or at its
limit. Then the state of every rank is queried over the control channel, which does not hang.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checklist.checks.collectives import flight
from checklist.measurements import IDLE, Hang, PhaseName
from checklist.run.control import (
    ClockQuery,
    Event,
    Hub,
    Limits,
    Position,
    PositionQuery,
    Positions,
    Restart,
    WorkerCommand,
    WorkerEnded,
    WorkerReply,
)

_STOPPED = "tTDZX"  # process states without progress: stopped, waiting for a device, dead
_CLOCK_ROUNDS = 5


@dataclass(frozen=True)
class _Lost:
    """Reason why a rank cannot reply any more."""

    reason: str
    kind: Literal["died", "lost"]
    at: Position | None = None
    """Last position of the rank, if known."""
    recorded: bool = False
    """Whether a Hang of this rank has been recorded."""


@dataclass
class Outcome:
    """Replies of the ranks to one request, failed ranks, and ranks that did not reply in time."""

    replies: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    unfinished: tuple[int, ...] = ()
    """Ranks that died, were lost or did not reply in time; their workers were restarted."""
    reason: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all ranks replied without an error."""
        return not self.errors and not self.unfinished


class Requests:
    """Requests through rank 0's hub, with attribution of hangs and failures to ranks."""

    def __init__(self, hub: Hub, limits: Limits) -> None:
        self.limits = limits
        self.phase: PhaseName = "facts"
        self.phase_ends = float("inf")
        self.nodes: dict[int, int] = {}  # node by rank, of all ranks that ever joined
        self.sinks: dict[int, int] = {}  # by rank: the port of its sink
        self.hangs: list[Hang] = []
        self.notes: list[str] = []
        self.hub = hub
        self.stopped = threading.Event()
        self._awaited: set[int] = set()  # ranks whose reply is pending
        self._dead: dict[int, _Lost] = {}  # ranks that died between requests, until they are restarted
        self._operation = ""  # operation of the current request
        self._ids = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose node agents are connected."""
        return tuple(sorted(self.hub.peers()))

    def request(
        self,
        kind: str,
        arguments: Mapping[int, Mapping[str, Any]],
        *,
        limit_s: float,
        collective: bool = False,
        operation: str | None = None,
    ) -> Outcome:
        """Send each rank a command with its arguments, and wait for the replies.

        ``collective``: the ranks need each other, so the others are not waited for after a failure. Ranks
        that hang or die are recorded, and their workers restarted.
        """
        self._ids += 1
        start = time.monotonic()
        deadline = min(start + limit_s, self.phase_ends)
        outcome, pending = Outcome(), set(arguments)
        self._awaited, self._operation = pending, operation or kind
        dead = {rank: _Lost("its node agent is gone", "lost") for rank in pending - set(self.ranks)}
        dead |= {rank: cause for rank, cause in self._dead.items() if rank in pending}
        for rank in arguments:
            self.send([rank], kind, arguments[rank], operation)
        while pending - set(dead) and time.monotonic() < deadline:
            event = self._next(min(0.5, deadline - time.monotonic()))
            if event is None:
                if self.stopped.is_set():
                    break
                continue
            failed = self._process(event, outcome, pending, dead)
            if failed and collective:
                deadline = min(deadline, time.monotonic() + self.limits.settle)
        if pending:
            waited = time.monotonic() - start
            at_deadline = bool(dead) or bool(outcome.errors) or waited >= 0.9 * limit_s
            self._attribute(set(pending), dead, self._operation, waited, outcome, at_deadline=at_deadline)
        self._awaited = set()
        return outcome

    def _process(self, event: Event, outcome: Outcome, pending: set[int], dead: dict[int, _Lost]) -> bool:
        """Process a node agent's message; return whether a rank failed."""
        if event.lost is not None:
            lost_ranks = pending.intersection(event.peer.request.ranks)
            dead.update(dict.fromkeys(lost_ranks, _Lost(event.lost, "lost")))
            return bool(lost_ranks)
        message = event.message
        if isinstance(message, WorkerEnded) and message.rank in pending:
            dead[message.rank] = _Lost(message.reason, "died", message.at)
            return True
        if (
            not isinstance(message, WorkerReply)
            or message.rank not in pending
            or message.reply.id != self._ids
        ):
            return False
        pending.discard(message.rank)
        if message.reply.kind == "done":
            outcome.replies[message.rank] = message.reply.reply
            return False
        outcome.errors[message.rank] = message.reply.error
        return True

    def _attribute(
        self,
        pending: set[int],
        dead: dict[int, _Lost],
        kind: str,
        waited_s: float,
        outcome: Outcome,
        *,
        at_deadline: bool,
    ) -> None:
        """Determine the ranks at fault, and restart the workers of all unfinished ranks."""
        outcome.unfinished = tuple(sorted(pending))
        alive = sorted(pending - set(dead))
        for rank, cause in dead.items():
            if cause.recorded:
                continue
            sequence = cause.at[1] if cause.at else None
            self._hang(rank, kind, sequence, waited_s, cause.kind, alive, cause.reason)
        behind: list[int] = []
        if not at_deadline:  # at the phase's time limit, slow ranks are not at fault
            outcome.reason = f"the time for the phase was over in {kind}"
        positions = self._query_positions(alive)
        records = self._traces(alive) if not dead else {}
        if not dead and alive:
            behind = (
                _lagging(positions, alive, bool(outcome.errors)) if at_deadline else _stuck(positions, alive)
            )
            behind = behind or (flight.lagging(records) if at_deadline else [])
            for rank in behind:
                blocked = [peer for peer in alive if peer not in behind]
                details = (_describe_state(positions.get(rank)), flight.describe(records, rank))
                detail = "; ".join(filter(None, details)) or None
                self._hang(
                    rank,
                    kind,
                    positions[rank][1] if rank in positions else None,
                    waited_s,
                    "hang",
                    blocked,
                    detail,
                )
            if not behind and at_deadline:
                outcome.reason = f"{kind}: all of ranks {_format_ranks(alive)} wait in it, none is behind"
        if outcome.reason is None and dead:
            outcome.reason = f"rank {_format_ranks(sorted(dead))} was lost or died in {kind}"
        elif outcome.reason is None:
            outcome.reason = (
                f"{kind} was ended after {waited_s:.1f} s: it waited for rank {_format_ranks(behind)}"
            )
        self.restart(outcome.unfinished)

    def _hang(
        self,
        rank: int,
        op: str,
        sequence: int | None,
        waited_s: float,
        kind: Any,
        blocked: list[int],
        detail: str | None,
    ) -> None:
        self.hangs.append(
            Hang(
                rank=rank,
                node=self.nodes.get(rank, -1),
                phase=self.phase,
                op=op,
                sequence=sequence,
                waited_s=waited_s,
                kind=kind,
                waiting=tuple(blocked),
                detail=detail,
            )
        )

    def restart(self, ranks: tuple[int, ...]) -> None:
        """Restart the workers of these ranks."""
        for rank in ranks:
            self.sinks.pop(rank, None)
            self._dead.pop(rank, None)
            peer = self.hub.peers().get(rank)
            if peer is not None:
                peer.connection.send(Restart(ranks=(rank,)))

    def _query_positions(self, ranks: list[int]) -> dict[int, Position]:
        """Query the positions of these ranks from their node agents."""
        for rank in ranks:
            peer = self.hub.peers().get(rank)
            if peer is not None:
                peer.connection.send(PositionQuery(id=self._ids, ranks=(rank,)))
        positions: dict[int, Position] = {}
        deadline = time.monotonic() + self.limits.settle
        while len(positions) < len(ranks) and time.monotonic() < deadline:
            event = self._next(0.2)
            if event is not None and isinstance(event.message, Positions):
                positions.update(event.message.ranks)
        return positions

    def _traces(self, ranks: list[int]) -> dict[int, flight.Record]:
        """Query torch's newest flight recorder entries of these ranks, where available."""
        self.send(ranks, "trace")
        records: dict[int, flight.Record] = {}
        dumps = 0
        deadline = time.monotonic() + self.limits.settle
        while dumps < len(ranks) and time.monotonic() < deadline:
            event = self._next(0.2)
            message = event.message if event else None
            if isinstance(message, WorkerReply) and message.reply.kind == "trace":
                dumps += 1
                if message.reply.record:
                    records[message.rank] = message.reply.record
        return records

    def clocks(self) -> dict[int, tuple[float, float]]:
        """Return each rank's clock minus this host's, and the error bound, from the shortest round trip."""
        best: dict[int, tuple[float, float]] = {}
        for number in range(_CLOCK_ROUNDS):
            self.hub.send(ClockQuery(round=number, at=time.time()))
            outstanding = set(self.ranks)
            deadline = time.monotonic() + 1.0
            while outstanding and time.monotonic() < deadline:
                event = self._next(0.2)
                message = event.message if event else None
                if event is None or not isinstance(message, ClockQuery) or message.round != number:
                    continue
                if message.now is None:
                    continue
                trip = time.time() - message.at
                for rank in event.peer.request.ranks:
                    outstanding.discard(rank)
                    if rank not in best or trip / 2 < best[rank][1]:
                        best[rank] = (message.now - message.at - trip / 2, trip / 2)
        return best

    def send(
        self, ranks: Any, kind: str, arguments: Mapping[str, Any] | None = None, operation: str | None = None
    ) -> None:
        peers = self.hub.peers()
        for rank in ranks:
            if rank in peers:
                peers[rank].connection.send(
                    WorkerCommand(
                        rank=rank,
                        id=self._ids,
                        what=kind,
                        operation=operation,
                        arguments=dict(arguments or {}),
                    )
                )

    def _next(self, timeout_s: float) -> Event | None:
        try:
            event = self.hub.events.get(timeout=max(0.01, timeout_s))
        except queue.Empty:
            return None
        if event.lost is not None:
            request = event.peer.request
            self.notes.append(f"Node {request.node} ({request.host}) was lost: {event.lost}.")
            for rank in set(request.ranks) - self._awaited:
                self._hang(rank, IDLE, None, 0.0, "lost", [], event.lost)
            self.lost(event)
        elif isinstance(event.message, WorkerEnded) and event.message.rank not in self._awaited:
            rank, reason = event.message.rank, event.message.reason
            self._hang(rank, IDLE, None, 0.0, "died", [], reason)
            self._dead[rank] = _Lost(reason, "died", event.message.at, recorded=True)
        return event

    def lost(self, event: Event) -> None:
        """Hook that is called when a node is lost, for saving data."""


def _lagging(positions: Mapping[int, Position], alive: list[int], others_failed: bool) -> list[int]:
    """Return the ranks that block the others: those that cannot run, else those with the fewest started
    operations.
    """
    if stuck := _stuck(positions, alive):
        return stuck
    fewest = min(positions[rank][1] for rank in alive)
    behind = [rank for rank in alive if positions[rank][1] == fewest]
    if len(behind) < len(alive) or len(alive) == 1 or others_failed:
        return behind
    return []


def _stuck(positions: Mapping[int, Position], alive: list[int]) -> list[int]:
    """Return ranks that cannot run, else those whose node agents do not reply."""
    stopped = [rank for rank in alive if rank in positions and positions[rank][2] in _STOPPED]
    return stopped or [rank for rank in alive if rank not in positions]


def _describe_state(position: Position | None) -> str | None:
    if position is None:
        return "its node agent did not report its state"
    texts = {"T": "stopped", "t": "stopped", "D": "waits in the kernel, for a device or a disk", "Z": "dead"}
    state = texts.get(position[2])
    return f"the process is {state}" if state else None


def _format_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
