"""Bisection for the smallest memory limit below which a case still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Whether a run below that limit (bytes) went through; None: not known, as the time was over
Trial = Callable[[int], bool | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a search: the case ran with ``runs_bytes`` and failed with ``fails_bytes``."""

    runs_bytes: int
    fails_bytes: int
    trials: int
    finished: bool  # False: the time was over before the interval was as narrow as asked for


def smallest_limit(trial: Trial, *, fails_bytes: int, runs_bytes: int, resolution_bytes: int) -> Found:
    """Halve the interval between a limit that cannot do and one that does until it is narrow enough.

    Parameters
    ----------
    trial:
        Runs the case below a limit.
    fails_bytes:
        Below what must be alive at once; it is not tried.
    runs_bytes:
        What the case reserved without a limit; it is not tried.
    resolution_bytes:
        How wide the interval may be in the end.
    """
    trials = 0
    while runs_bytes - fails_bytes > max(resolution_bytes, 1):
        middle = (runs_bytes + fails_bytes) // 2
        answer = trial(middle)
        if answer is None:
            return Found(runs_bytes=runs_bytes, fails_bytes=fails_bytes, trials=trials, finished=False)
        trials += 1
        if answer:
            runs_bytes = middle
        else:
            fails_bytes = middle
    return Found(runs_bytes=runs_bytes, fails_bytes=fails_bytes, trials=trials, finished=True)
