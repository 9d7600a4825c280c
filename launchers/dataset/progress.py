"""Progress lines for long operations on rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from estimator.formatting import format_duration
from estimator.terminal import print

EVERY_S = 5.0
LEAST_SHARE = 0.02  # for an estimate of the time left, which includes the start of processes


class Progress:
    """Printer of progress lines on standard error, at most one in :data:`EVERY_S` seconds."""

    def __init__(self, name: str, total: int | None = None, unit: str = "rows") -> None:
        self._name, self._total, self._unit = name, total, unit
        self._started = self._printed = time.monotonic()

    def at(self, count: int, share: Callable[[], float] | None = None) -> None:
        """Report that ``count`` units are done. ``share``: called for the fraction done."""
        now = time.monotonic()
        if now - self._printed < EVERY_S:
            return
        self._printed = now
        print(self._line(count, share() if share else None, now - self._started), file=sys.stderr, flush=True)

    def _line(self, count: int, share: float | None, seconds: float) -> str:
        """Format a progress line. ``seconds``: time since the start."""
        if share is None and self._total:
            share = count / self._total
        total = f" of {self._total:,}" if self._total else ""
        line = f"{self._name}: {count:,}{total} {self._unit}"
        if not share:
            return line
        if share < LEAST_SHARE:
            return f"{line}, {share:.0%}"
        remaining = seconds * (1 - min(share, 1.0)) / share
        return f"{line}, {share:.0%}, {format_duration(remaining)} left"
