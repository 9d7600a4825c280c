"""Probability that a run exceeds the memory of its GPU, and the verdict that follows from it.

The actual need of a run is assumed to be normally distributed around the predicted one, with a separate
deviation on each side: 95 % of runs from sources outside the fit are within the range of the need
(``data/residuals.csv``). ``python -m benchmarks.published.refit`` compares the probabilities with published
runs that ran or failed.
"""

from __future__ import annotations

import math
from typing import Literal

Verdict = Literal["fits", "tight", "does not fit"]

FITS_BELOW = 0.02  # risk up to which a plan fits
TIGHT_BELOW = 0.20  # risk up to which a plan is tight; above, it does not fit
DEVIATIONS_AT_TIGHT = 0.8417  # of the normal distribution, exceeded by 20 %
WITHIN = 1.96  # standard deviations to both sides that include 95 %
# Standard deviation over the need, for losses of the allocator that the residuals do not cover. The smallest
# limit at which six runs passed on an H200 was 0.2 to 3.3 % above the predicted need, in the mean 1.8 %
# (benchmarks/results/on_gpu_1x_nvidia_h200.md). By Student's distribution for six values, 2 % of such runs
# need 5.3 % more than predicted, which are 2.05 of these deviations.
LEAST_SPREAD = 0.025


def out_of_memory_risk(needs: int, limits: tuple[int, int], capacity: int) -> float:
    """Probability that a run needs more than ``capacity`` bytes.

    ``needs`` is the predicted need and ``limits`` are the ends of its range, in bytes.
    """
    end = limits[1] if capacity >= needs else limits[0]
    spread = _deviation(needs, end)
    return 0.5 * math.erfc((capacity - needs) / spread / math.sqrt(2)) if spread else float(needs > capacity)


def least_capacity(needs: int, limits: tuple[int, int]) -> int:
    """Return the smallest capacity in bytes with which a run is tight instead of too large."""
    return math.ceil(needs + DEVIATIONS_AT_TIGHT * _deviation(needs, limits[1]))


def _deviation(needs: int, end: int) -> float:
    """Return the standard deviation of the need on one side, from that end of its range."""
    return math.hypot((end - needs) / WITHIN, LEAST_SPREAD * needs)


def verdict_of(risk: float) -> Verdict:
    """Return whether a run of that risk fits, is tight, or does not fit."""
    if risk < FITS_BELOW:
        return "fits"
    return "tight" if risk < TIGHT_BELOW else "does not fit"
