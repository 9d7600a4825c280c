"""Bisection for the smallest memory limit below which a case still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Run the case below a limit in bytes; return whether it succeeded, None if the time limit came first
Trial = Callable[[int], bool | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a search: the case ran with ``runs_bytes`` and failed with ``fails_bytes``."""

    runs_bytes: int
    fails_bytes: int
    trials: int
    finished: bool  # False: the time limit came before the interval was narrow enough


def smallest_limit(trial: Trial, *, fails_bytes: int, runs_bytes: int, resolution_bytes: int) -> Found:
    """Find the smallest memory limit below which a case runs, by bisection.

    Parameters
    ----------
    trial:
        Runs the case below a limit.
    fails_bytes:
        Lower bound: a limit that is known to be too low; not tried.
    runs_bytes:
        Upper bound: bytes that the case reserved without a limit; not tried.
    resolution_bytes:
        Largest width of the final interval.
    """
    trials = 0
    while runs_bytes - fails_bytes > max(resolution_bytes, 1):
        middle = (runs_bytes + fails_bytes) // 2
        ran = trial(middle)
        if ran is None:
            return Found(runs_bytes=runs_bytes, fails_bytes=fails_bytes, trials=trials, finished=False)
        trials += 1
        if ran:
            runs_bytes = middle
        else:
            fails_bytes = middle
    return Found(runs_bytes=runs_bytes, fails_bytes=fails_bytes, trials=trials, finished=True)
