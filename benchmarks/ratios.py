"""Ratio of a collective's time to that of a bare loop, with a confidence interval.

Both are timed in one run, alternating in random order over the same buffers, so that load on the machine
slows both. A turn's ratio is bare seconds over ours, which equals our bandwidth over the bare loop's. The
median over turns is reported, because single turns on a busy machine may be off by a factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

SMALLEST_BYTES = 64 << 10  # below, latency dominates a collective's time
_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)  # percentiles: 95 %
_SEED = 0  # the same turns give the same interval

Turns = tuple[Sequence[float], Sequence[float]]  # seconds: ours, bare
Cell = tuple[str, str, int]  # operation, type, bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Our bandwidth over the bare loop's, and its 95 % interval (percentile bootstrap over the turns)."""

    value: float
    low: float
    high: float
    turns: int


def of_cell(turns: Turns) -> Ratio:
    """Return the ratio of one cell."""
    return overall([turns])


def overall(every: Iterable[Turns]) -> Ratio:
    """Return the median of the cells' ratios. At least one cell must have a measurement.

    The interval is a bootstrap over the turns within each cell.
    """
    logs = [np.log(np.asarray(bare) / np.asarray(ours)) for ours, bare in every]
    draw = np.random.default_rng(_SEED)
    drawn = np.median([np.median(draw.choice(log, (_RESAMPLES, len(log))), axis=1) for log in logs], axis=0)
    low, high = np.exp(np.percentile(drawn, _INTERVAL))
    value = np.exp(np.median([np.median(log) for log in logs]))
    return Ratio(value=float(value), low=float(low), high=float(high), turns=sum(map(len, logs)))
