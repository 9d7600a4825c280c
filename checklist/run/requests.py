"""Requests to workers: each ends in bounded time, and where it does not end well, someone is named.

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
    At,
    Clock,
    Do,
    Ended,
    Event,
    FromWorker,
    Hub,
    Limits,
    Position,
    Restart,
    Where,
)

_STOPPED = "tTDZX"  # states in which a process cannot do its part: stopped, waiting for a device, dead
_CLOCK_ROUNDS = 5


@dataclass(frozen=True)
class _Gone:
    """Reason why a rank cannot reply any more."""

    why: str
    kind: Literal["died", "lost"]
    at: Position | None = None
    """Where it was then, if that is known."""
    recorded: bool = False
    """Whether there is a Hang of it already."""


@dataclass
class Outcome:
    """Replies of the ranks to one request, failed ranks, and ranks that did not reply in time."""

    replies: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    unfinished: tuple[int, ...] = ()
    """Ranks that died, were lost or did not answer in time; their workers were restarted."""
    why: str | None = None

    @property
    def whole(self) -> bool:
        return not self.errors and not self.unfinished


class Requests:
    """Rank 0's hub, and who of those that it knows is to blame for what."""

    def __init__(self, hub: Hub, limits: Limits) -> None:
        self.limits = limits
        self.phase: PhaseName = "facts"
        self.phase_ends = float("inf")
        self.nodes: dict[int, int] = {}  # by rank, all that have ever been there
        self.sinks: dict[int, int] = {}  # by rank: the port of its sink
        self.hangs: list[Hang] = []
        self.notes: list[str] = []
        self.hub = hub
        self.stopped = threading.Event()
        self._asked: set[int] = set()  # ranks that have yet to answer
        self._dead: dict[int, _Gone] = {}  # ranks that died with nothing to answer, until they are restarted
        self._operation = ""  # what they were asked for
        self._ids = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose supervisors are connected."""
        return tuple(sorted(self.hub.peers()))

    def ask(
        self,
        what: str,
        arguments: Mapping[int, Mapping[str, Any]],
        *,
        limit_s: float,
        together: bool = False,
        operation: str | None = None,
    ) -> Outcome:
        """Ask those ranks, each with its arguments.

        ``together``: they need each other, so when one has failed the others are not waited for. Ranks that
        hang or die are recorded, and their workers started again.
        """
        self._ids += 1
        begin = time.monotonic()
        deadline = min(begin + limit_s, self.phase_ends)
        outcome, pending = Outcome(), set(arguments)
        self._asked, self._operation = pending, operation or what
        died = {rank: _Gone("its supervisor is gone", "lost") for rank in pending - set(self.ranks)}
        died |= {rank: gone for rank, gone in self._dead.items() if rank in pending}
        for rank in arguments:
            self.send([rank], what, arguments[rank], operation)
        while pending - set(died) and time.monotonic() < deadline:
            event = self._next(min(0.5, deadline - time.monotonic()))
            if event is None:
                if self.stopped.is_set():
                    break
                continue
            failed = self._note(event, outcome, pending, died)
            if failed and together:
                deadline = min(deadline, time.monotonic() + self.limits.settle)
        if pending:
            waited = time.monotonic() - begin
            patient = bool(died) or bool(outcome.errors) or waited >= 0.9 * limit_s
            self._blame(set(pending), died, self._operation, waited, outcome, patient=patient)
        self._asked = set()
        return outcome

    def _note(self, event: Event, outcome: Outcome, pending: set[int], died: dict[int, _Gone]) -> bool:
        """Take in what a supervisor has said; whether someone has failed."""
        if event.lost is not None:
            gone = pending.intersection(event.peer.request.ranks)
            died.update(dict.fromkeys(gone, _Gone(event.lost, "lost")))
            return bool(gone)
        message = event.message
        if isinstance(message, Ended) and message.rank in pending:
            died[message.rank] = _Gone(message.why, "died", message.at)
            return True
        if (
            not isinstance(message, FromWorker)
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

    def _blame(
        self,
        pending: set[int],
        died: dict[int, _Gone],
        what: str,
        waited_s: float,
        outcome: Outcome,
        *,
        patient: bool,
    ) -> None:
        """Say who is at fault, and start the workers of all that did not finish again."""
        outcome.unfinished = tuple(sorted(pending))
        alive = sorted(pending - set(died))
        for rank, gone in died.items():
            if gone.recorded:
                continue
            sequence = gone.at[1] if gone.at else None
            self._hang(rank, what, sequence, waited_s, gone.kind, alive, gone.why)
        behind: list[int] = []
        if not patient:  # the phase's time was over: whoever is merely slow is not to blame
            outcome.why = f"the time for the phase was over in {what}"
        at = self._where(alive)
        records = self._traces(alive) if not died else {}
        if not died and alive:
            behind = _behind(at, alive, bool(outcome.errors)) if patient else _stuck(at, alive)
            behind = behind or (flight.behind(records) if patient else [])
            for rank in behind:
                waiting = [other for other in alive if other not in behind]
                details = (_state_words(at.get(rank)), flight.words(records, rank))
                detail = "; ".join(filter(None, details)) or None
                self._hang(rank, what, at[rank][1] if rank in at else None, waited_s, "hang", waiting, detail)
            if not behind and patient:
                outcome.why = f"{what}: all of ranks {_some(alive)} wait in it, none is behind"
        if outcome.why is None and died:
            outcome.why = f"rank {_some(sorted(died))} was lost or died in {what}"
        elif outcome.why is None:
            outcome.why = f"{what} was ended after {waited_s:.1f} s: it waited for rank {_some(behind)}"
        self.restart(outcome.unfinished)

    def _hang(
        self,
        rank: int,
        op: str,
        sequence: int | None,
        waited_s: float,
        kind: Any,
        waiting: list[int],
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
                waiting=tuple(waiting),
                detail=detail,
            )
        )

    def restart(self, ranks: tuple[int, ...]) -> None:
        """Start new workers for those ranks."""
        for rank in ranks:
            self.sinks.pop(rank, None)
            self._dead.pop(rank, None)
            peer = self.hub.peers().get(rank)
            if peer is not None:
                peer.connection.send(Restart(ranks=(rank,)))

    def _where(self, ranks: list[int]) -> dict[int, Position]:
        """Return the positions of those ranks, from their supervisors."""
        for rank in ranks:
            peer = self.hub.peers().get(rank)
            if peer is not None:
                peer.connection.send(Where(id=self._ids, ranks=(rank,)))
        positions: dict[int, Position] = {}
        deadline = time.monotonic() + self.limits.settle
        while len(positions) < len(ranks) and time.monotonic() < deadline:
            event = self._next(0.2)
            if event is not None and isinstance(event.message, At):
                positions.update(event.message.ranks)
        return positions

    def _traces(self, ranks: list[int]) -> dict[int, flight.Record]:
        """Return torch's newest flight recorder entries of those ranks, if there are any and they can
        reply.
        """
        self.send(ranks, "trace")
        records: dict[int, flight.Record] = {}
        answered = 0
        deadline = time.monotonic() + self.limits.settle
        while answered < len(ranks) and time.monotonic() < deadline:
            event = self._next(0.2)
            message = event.message if event else None
            if isinstance(message, FromWorker) and message.reply.kind == "trace":
                answered += 1
                if message.reply.record:
                    records[message.rank] = message.reply.record
        return records

    def clocks(self) -> dict[int, tuple[float, float]]:
        """By rank: its clock minus this host's, and how wrong that can be, from the shortest round trip."""
        best: dict[int, tuple[float, float]] = {}
        for number in range(_CLOCK_ROUNDS):
            self.hub.send(Clock(round=number, at=time.time()))
            waiting = set(self.ranks)
            deadline = time.monotonic() + 1.0
            while waiting and time.monotonic() < deadline:
                event = self._next(0.2)
                message = event.message if event else None
                if event is None or not isinstance(message, Clock) or message.round != number:
                    continue
                if message.now is None:
                    continue
                trip = time.time() - message.at
                for rank in event.peer.request.ranks:
                    waiting.discard(rank)
                    if rank not in best or trip / 2 < best[rank][1]:
                        best[rank] = (message.now - message.at - trip / 2, trip / 2)
        return best

    def send(
        self, ranks: Any, what: str, arguments: Mapping[str, Any] | None = None, operation: str | None = None
    ) -> None:
        peers = self.hub.peers()
        for rank in ranks:
            if rank in peers:
                peers[rank].connection.send(
                    Do(
                        rank=rank,
                        id=self._ids,
                        what=what,
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
            for rank in set(request.ranks) - self._asked:
                self._hang(rank, IDLE, None, 0.0, "lost", [], event.lost)
            self.lost(event)
        elif isinstance(event.message, Ended) and event.message.rank not in self._asked:
            rank, why = event.message.rank, event.message.why
            self._hang(rank, IDLE, None, 0.0, "died", [], why)
            self._dead[rank] = _Gone(why, "died", event.message.at, recorded=True)
        return event

    def lost(self, event: Event) -> None:
        """A node has just been lost; for whoever has something to save then."""


def _behind(at: Mapping[int, Position], alive: list[int], others_failed: bool) -> list[int]:
    """Return the ranks that hold the others up: those that cannot run, else those with the fewest started
    operations.
    """
    if stuck := _stuck(at, alive):
        return stuck
    fewest = min(at[rank][1] for rank in alive)
    behind = [rank for rank in alive if at[rank][1] == fewest]
    if len(behind) < len(alive) or len(alive) == 1 or others_failed:
        return behind
    return []


def _stuck(at: Mapping[int, Position], alive: list[int]) -> list[int]:
    """Ranks that cannot run, else those whose supervisors don't answer."""
    stopped = [rank for rank in alive if rank in at and at[rank][2] in _STOPPED]
    return stopped or [rank for rank in alive if rank not in at]


def _state_words(at: Position | None) -> str | None:
    if at is None:
        return "its supervisor did not report its state"
    words = {"T": "stopped", "t": "stopped", "D": "waits in the kernel, for a device or a disk", "Z": "dead"}
    state = words.get(at[2])
    return f"the process is {state}" if state else None


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
