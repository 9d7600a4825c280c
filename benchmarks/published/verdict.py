"""The verdict: whether runs that ran are called possible, and runs that ran out of memory impossible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.published.rows import PublishedRow
from estimator import memory
from estimator.errors import UserError
from estimator.plan import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Whether one run is called possible on its GPU, beside whether it ran."""

    row: PublishedRow
    needs_gib: float
    capacity_gib: float

    @property
    def accepted(self) -> bool:
        """Whether the run is said to fit."""
        return self.needs_gib <= self.capacity_gib

    @property
    def wrong(self) -> bool:
        """Whether a run that ran is refused, or one that ran out of memory accepted."""
        return self.accepted == self.row.oom


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How often what ran is called "does not fit", and what ran out of memory "fits"."""

    ran: int
    refused_of_ran: int
    oom: int
    accepted_of_oom: int


def judge(row: PublishedRow) -> Judged | str:
    """Whether the estimator says that a run fits its GPU, or the reason why it can't be asked."""
    if row.verdict_skip or row.setup is None or row.capacity_bytes is None:
        return row.verdict_skip or "the GPU is not stated"
    try:
        estimate = memory.estimate(row.setup)
    except UserError as error:
        return error.problem
    return Judged(row=row, needs_gib=estimate.needs_bytes / GIB, capacity_gib=row.capacity_bytes / GIB)


def verdict(items: Iterable[Judged]) -> Verdict:
    """The judged runs, counted."""
    items = tuple(items)
    ran = [item for item in items if not item.row.oom]
    oom = [item for item in items if item.row.oom]
    return Verdict(
        ran=len(ran),
        refused_of_ran=sum(not item.accepted for item in ran),
        oom=len(oom),
        accepted_of_oom=sum(item.accepted for item in oom),
    )
