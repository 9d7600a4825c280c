"""While a step waits for its nodes: say why, and give up where none has come for a time.

Runs in the process that waits for a step's Job, JobSet or Batch job (Metaflow's ``kubernetes step`` and
``batch step``), each time that Metaflow asks for the job's state. So does the look at the datastore.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends import waiting_datastore
from decorators.backends.interface import WaitState
from decorators.backends.registry import BACKENDS
from estimator.errors import UserError
from estimator.formatting import format_duration

TIMEOUT_VARIABLE = "FINETUNE_PENDING_TIMEOUT"  # minutes
ASK_EVERY_S = 5.0
SAY_EVERY_S = 60.0


@dataclass(kw_only=True, slots=True)
class Watch:
    """One wait. Called with the job as often as one likes; asks the cluster every ``every_s`` seconds.

    A reason is said when it is new, and every minute again. The time runs again when one more node has come.
    """

    timeout_s: float
    wait_state: Callable[[WaitedJob], WaitState]
    remove: Callable[[WaitedJob], None]
    say: Callable[[str], None] = _metaflow.say
    every_s: float = ASK_EVERY_S
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _came: float = 0.0  # when the last node did, or the wait began
    _running: int = 0
    _next: float = 0.0
    _last_said: str = ""
    _said_at: float = 0.0
    _reason: str = ""
    _failing_since: dict[str, float] = field(default_factory=dict)
    _over: bool = False

    def __call__(self, job: WaitedJob) -> None:
        """Raises UserError when the wait is over for good; the job is removed by then."""
        now = self.clock()
        if self._began is None:
            self._began = self._came = now
        if self._over or now < self._next:
            return
        self._next = now + self.every_s
        state = self.wait_state(job)
        if not state.pending:
            self._over = True
            return
        if state.running > self._running:
            self._running, self._came = state.running, now
        self._say_reason(job, state, now)
        self._fail_early(job, state, now)
        if now - self._came >= self.timeout_s:
            why = self._reason or "no reason is told"
            limit = format_duration(self.timeout_s)
            late = (
                f"{self._running} of {state.nodes} nodes have started, and none more for {limit}"
                if self._running
                else f"had not started after {limit}"
            )
            self._give_up(
                job,
                f"{job.what}{':' if self._running else ''} {late} ({why})",
                "Wait longer with --pending-timeout MINUTES, or ask for what the cluster has.",
            )

    def _say_reason(self, job: WaitedJob, state: WaitState, now: float) -> None:
        if not state.reason:
            return
        self._reason = state.reason
        # Counts change with every pod that comes and goes elsewhere, names with each that is tried
        plain = re.sub(r'"[^"]*"|\d+', "#", state.reason)
        if plain == self._last_said and now - self._said_at < SAY_EVERY_S:
            return
        there = ""
        if self._running:
            names = ", ".join(state.missing[:4]) + (", ..." if len(state.missing) > 4 else "")
            there = f" ({self._running} of {state.nodes} nodes run{'; not yet ' if names else ''}{names})"
        waited = format_duration(0 if self._began is None else now - self._began)
        took = f" for {waited}" if plain == self._last_said else ""
        self._last_said, self._said_at = plain, now
        self.say(f"{job.what} waits{took}{there}: {state.reason}")

    def _fail_early(self, job: WaitedJob, state: WaitState, now: float) -> None:
        """Give up on what waiting doesn't cure, once it has stayed so for its grace."""
        if state.hopeless is None:
            self._failing_since.clear()
            return
        since = self._failing_since.setdefault(state.hopeless.kind, now)
        if now - since >= state.hopeless.grace_s:
            self._give_up(job, f"{job.what} can't start: {state.reason}", state.hopeless.advice)

    def _give_up(self, job: WaitedJob, problem: str, advice: str) -> None:
        self._over = True
        self.remove(job)
        raise UserError(f"{problem.rstrip('.')}; it has been removed.", advice)


_installed = False


def install(given_up: Callable[[str], None] = lambda _: None) -> None:
    """Watch what this process waits for, once; for the process that Metaflow starts for a remote step.

    The wait for nodes is watched where the launch has set a limit for it, the datastore in any case.
    ``given_up`` receives why a wait has ended.
    """
    global _installed
    if _installed:
        return
    _installed = True
    text = os.environ.get(TIMEOUT_VARIABLE)
    watches: dict[str, list[Callable[[WaitedJob], None]]] = {}

    def seen(job: WaitedJob) -> None:
        if job.name not in watches:  # one that was submitted again is waited for again
            backend = BACKENDS[job.backend]
            watches[job.name] = []
            if text:
                start = Watch(
                    timeout_s=float(text) * 60, wait_state=backend.wait_state, remove=backend.remove
                )
                watches[job.name].append(start)
            if (datastore := waiting_datastore.watch(backend.remove)) is not None:
                watches[job.name].append(datastore)
        try:
            for watch in watches[job.name]:
                watch(job)
        except UserError as error:
            given_up(error.problem)
            raise

    _metaflow.watch_waiting(seen)
