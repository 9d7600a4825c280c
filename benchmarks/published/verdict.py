"""Verdict of the estimator on published runs: does each fit its GPU, and did it run?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.published.rows import PublishedRow
from estimator import memory
from estimator.errors import UserError
from estimator.plan import GIB
from estimator.risk import FITS_BELOW, TIGHT_BELOW, verdict_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Predicted memory of one run and the capacity of its GPU."""

    row: PublishedRow
    needs_gib: float
    capacity_gib: float
    risk: float  # predicted probability that it runs out of memory

    @property
    def accepted(self) -> bool:
        """Whether the run fits by the estimate, tight or not."""
        return verdict_of(self.risk) != "does not fit"

    @property
    def wrong(self) -> bool:
        """Whether a run that completed is refused, or one that ran out of memory is accepted."""
        return self.accepted == self.row.oom


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Number of completed runs and of those refused; of out-of-memory runs and of those accepted."""

    ran: int
    refused_of_ran: int
    oom: int
    accepted_of_oom: int


def judge(row: PublishedRow) -> Judged | str:
    """Estimate whether a run fits its GPU, or return the reason why that is unknown."""
    if row.verdict_skip or row.setup is None or row.capacity_bytes is None:
        return row.verdict_skip or "the GPU is not stated"
    try:
        estimate = memory.estimate(row.setup, capacity_bytes=row.capacity_bytes)
    except UserError as error:
        return error.problem
    return Judged(
        row=row,
        needs_gib=estimate.needs_bytes / GIB,
        capacity_gib=row.capacity_bytes / GIB,
        risk=estimate.out_of_memory_risk or 0.0,
    )


# Limits of the predicted risk between the rows of the calibration table
RISK_LIMITS = (0.0, 0.001, FITS_BELOW, 0.05, TIGHT_BELOW, 0.5, 0.8, 1.0)
HEADROOM_LIMITS = (0.0, 0.04, 0.06, 0.08, 0.1, 0.15, 1.0)  # likewise of the share of the GPU left free


def calibration(items: Iterable[Judged]) -> list[dict[str, float]]:
    """Compare predicted risk with observed frequency: one record per range of the risk that has runs."""
    items, records = tuple(items), []
    for low, high in itertools.pairwise(RISK_LIMITS):
        runs = [item for item in items if low <= item.risk < high or item.risk == high == 1.0]
        if runs:
            records.append(
                {
                    "from": low,
                    "to": high,
                    "runs": len(runs),
                    "sources": len({item.row.source for item in runs}),
                    "predicted": round(sum(item.risk for item in runs) / len(runs), 4),
                    "oom": sum(item.row.oom for item in runs),
                }
            )
    return records


def by_headroom(items: Iterable[Judged]) -> list[dict[str, float]]:
    """Count runs by predicted headroom, as a fraction of the GPU's memory: all, and those called "fits".

    One record per range that has runs; "oom" and "oom_of_fits" ran out of memory.
    """
    items, records = tuple(items), []
    for low, high in itertools.pairwise(HEADROOM_LIMITS):
        runs = [item for item in items if low <= 1 - item.needs_gib / item.capacity_gib < high]
        fits = [item for item in runs if verdict_of(item.risk) == "fits"]
        if runs:
            records.append(
                {
                    "from": low,
                    "to": high,
                    "runs": len(runs),
                    "sources": len({item.row.source for item in runs}),
                    "oom": sum(item.row.oom for item in runs),
                    "fits": len(fits),
                    "oom_of_fits": sum(item.row.oom for item in fits),
                }
            )
    return records


def verdict(items: Iterable[Judged]) -> Verdict:
    """Count the judged runs."""
    items = tuple(items)
    ran = [item for item in items if not item.row.oom]
    oom = [item for item in items if item.row.oom]
    return Verdict(
        ran=len(ran),
        refused_of_ran=sum(not item.accepted for item in ran),
        oom=len(oom),
        accepted_of_oom=sum(item.accepted for item in oom),
    )
