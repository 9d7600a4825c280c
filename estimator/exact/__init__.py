"""Exact mode: a trace of the real model and its optimizer's step, without a GPU and without memory.

The tensors are fake (torch's FakeTensorMode): they have shapes and storages of a size, and no contents. A
tracker follows every storage from its allocation to its release. The formulas of ``estimator.memory`` are
tested against it. This package loads no torch; its process does.
"""

from __future__ import annotations

from collections.abc import Sequence

from estimator.exact import process, support
from estimator.exact.result import ExactEstimate, Moment
from estimator.setup import Setup

__all__ = ["ExactEstimate", "Moment", "estimate", "estimate_many"]


def estimate(setup: Setup, *, time_limit_s: float = 600) -> ExactEstimate:
    """The live bytes of one process of ``setup``, from a trace of the real model and optimizer.

    Raises UserError where the step cannot be traced, torch is missing, or ``time_limit_s`` seconds have
    passed.
    """
    return estimate_many([setup], time_limit_s=time_limit_s)[0]


def estimate_many(setups: Sequence[Setup], *, time_limit_s: float = 600) -> list[ExactEstimate]:
    """One estimate for each setup, all traced in one process, which loads torch once.

    Raises UserError where a step cannot be traced, torch is missing, or ``time_limit_s`` seconds (for all
    setups together) have passed.
    """
    for setup in setups:
        support.check(setup)
    return process.trace(setups, time_limit_s)
