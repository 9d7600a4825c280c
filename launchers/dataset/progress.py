"""Long work on rows says every few seconds how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from estimator.formatting import format_duration

EVERY_S = 5.0


class Progress:
    """A line on standard error at most every :data:`EVERY_S` seconds; short work says nothing."""

    def __init__(self, what: str, total: int | None = None, unit: str = "rows") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._began = self._said = time.monotonic()

    def at(self, done: int, share: Callable[[], float] | None = None) -> None:
        """So much is done. ``share``: tells how much of the whole that is, where there is no total."""
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        print(self._line(done, share() if share else None, now - self._began), file=sys.stderr, flush=True)

    def _line(self, done: int, share: float | None, seconds: float) -> str:
        if share is None and self._total:
            share = done / self._total
        of = f" of {self._total:,}" if self._total else ""
        line = f"{self._what}: {done:,}{of} {self._unit}"
        if not share:
            return line
        left = seconds * (1 - min(share, 1.0)) / share
        return f"{line}, {share:.0%}, {format_duration(left)} left"
