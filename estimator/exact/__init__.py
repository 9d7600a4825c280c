"""Exact mode: trace of the real model and its optimizer step, without a GPU and without allocating memory.

The tensors are fake (torch's FakeTensorMode): they have shapes and storage sizes, but no contents. A tracker
follows every storage from its allocation to its release. The formulas of ``estimator.memory`` are tested
against it. torch is imported by a child process only.
"""

from __future__ import annotations

from collections.abc import Sequence

from estimator.exact import process, support
from estimator.exact.result import ExactEstimate
from estimator.setup import Setup

__all__ = ["ExactEstimate", "estimate", "estimate_many"]


def estimate(setup: Setup, *, time_limit_s: float = 600) -> ExactEstimate:
    """Trace the real model and optimizer, and return the live bytes of one process.

    Raises UserError if the step cannot be traced, torch is missing, or the time limit is exceeded.
    """
    return estimate_many([setup], time_limit_s=time_limit_s)[0]


def estimate_many(setups: Sequence[Setup], *, time_limit_s: float = 600) -> list[ExactEstimate]:
    """Trace several setups in one child process, which imports torch once.

    ``time_limit_s``: limit for all setups together. Raises UserError if a step cannot be traced, torch is
    missing, or the limit is exceeded.
    """
    for setup in setups:
        support.check(setup)
    return process.trace(setups, time_limit_s)
