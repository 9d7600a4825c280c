"""Watch a step that waits for its nodes: report the reason, and give up after a timeout.

Runs in the process that waits for a step's Job, JobSet or Batch job (``kubernetes step`` and ``batch step``
of Metaflow) whenever Metaflow polls the job's state. The datastore is checked at the same time.
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
POLL_EVERY_S = 5.0
REPORT_EVERY_S = 60.0


@dataclass(kw_only=True, slots=True)
class Watch:
    """Watch of one wait. May be called at any rate; queries the cluster every ``every_s`` seconds.

    A reason is reported when it changes, and otherwise once a minute. The timeout restarts whenever another
    node has started.
    """

    timeout_s: float
    wait_state: Callable[[WaitedJob], WaitState]
    remove: Callable[[WaitedJob], None]
    report: Callable[[str], None] = _metaflow.print_line
    every_s: float = POLL_EVERY_S
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _progress_at: float = 0.0  # when the last node started, or the wait began
    _running: int = 0
    _next: float = 0.0
    _last_reason: str = ""
    _reported_at: float = 0.0
    _reason: str = ""
    _failing_since: dict[str, float] = field(default_factory=dict)
    _finished: bool = False

    def __call__(self, job: WaitedJob) -> None:
        """Check the wait. Raises UserError when it is given up; the job is removed first."""
        now = self.clock()
        if self._began is None:
            self._began = self._progress_at = now
        if self._finished or now < self._next:
            return
        self._next = now + self.every_s
        state = self.wait_state(job)
        if not state.pending:
            self._finished = True
            return
        if state.running > self._running:
            self._running, self._progress_at = state.running, now
        self._report_reason(job, state, now)
        self._fail_early(job, state, now)
        if now - self._progress_at >= self.timeout_s:
            reason = self._reason or "no reason reported"
            limit = format_duration(self.timeout_s)
            overdue = (
                f"{self._running} of {state.nodes} nodes have started, no further node within {limit}"
                if self._running
                else f"had not started after {limit}"
            )
            self._give_up(
                job,
                f"{job.what}{':' if self._running else ''} {overdue} ({reason})",
                "Wait longer (--pending-timeout MINUTES), or request GPUs that the cluster has.",
            )

    def _report_reason(self, job: WaitedJob, state: WaitState, now: float) -> None:
        if not state.reason:
            return
        self._reason = state.reason
        # Counts and names in a reason change with every pod in the cluster, so they are ignored in the
        # comparison
        pattern = re.sub(r'"[^"]*"|\d+', "#", state.reason)
        if pattern == self._last_reason and now - self._reported_at < REPORT_EVERY_S:
            return
        progress = ""
        if self._running:
            names = ", ".join(state.missing[:4]) + (", ..." if len(state.missing) > 4 else "")
            progress = (
                f" ({self._running} of {state.nodes} nodes running{'; waiting for ' if names else ''}{names})"
            )
        waited = format_duration(0 if self._began is None else now - self._began)
        duration = f" for {waited}" if pattern == self._last_reason else ""
        self._last_reason, self._reported_at = pattern, now
        self.report(f"{job.what} is waiting{duration}{progress}: {state.reason}")

    def _fail_early(self, job: WaitedJob, state: WaitState, now: float) -> None:
        """Give up on a permanent failure after its grace period."""
        if state.permanent_failure is None:
            self._failing_since.clear()
            return
        since = self._failing_since.setdefault(state.permanent_failure.kind, now)
        if now - since >= state.permanent_failure.grace_period_s:
            self._give_up(job, f"{job.what} cannot start: {state.reason}", state.permanent_failure.advice)

    def _give_up(self, job: WaitedJob, problem: str, advice: str) -> None:
        self._finished = True
        self.remove(job)
        raise UserError(f"{problem.rstrip('.')}; the job was removed.", advice)


_installed = False


def install(on_give_up: Callable[[str], None] = lambda _: None) -> None:
    """Install the watches in the process that Metaflow starts for a remote step; idempotent.

    The wait for nodes is watched if the launch has set a timeout, the datastore always. ``on_give_up``
    receives the reason when a wait is given up.
    """
    global _installed
    if _installed:
        return
    _installed = True
    text = os.environ.get(TIMEOUT_VARIABLE)
    watches: dict[str, list[Callable[[WaitedJob], None]]] = {}

    def watch_job(job: WaitedJob) -> None:
        if job.name not in watches:  # a resubmitted job has a new name and gets new watches
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
            on_give_up(error.problem)
            raise

    _metaflow.watch_waiting(watch_job)
