"""Costs of runs by user, team or model: measured hours at the prices of their plans.

Failed attempts cost as much as others. Hours of nodes without a known price are reported separately, never
counted as free; so are attempts without a known end.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from math import fsum
from typing import Any, Literal

from estimator.errors import UserError

By = Literal["user", "team", "model"]
BY: tuple[By, ...] = ("user", "team", "model")
UNNAMED = "-"  # label of runs whose user, team or model is not recorded
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One attempt of one node's task."""

    hours: float | None  # None: the end is unknown
    failed: bool
    usd_per_hour: float | None  # price of the used share of the node; None: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """Use of GPU machines by one run."""

    run: str
    user: str
    team: str
    model: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Sum over one user, team or model, in node hours: two nodes for one hour are two."""

    name: str
    runs: int
    hours: float
    failed_hours: float  # part of ``hours`` in failed attempts
    usd: float | None  # price of the priced hours; None: no price is known
    unpriced_hours: float
    unfinished: int  # attempts that are not counted, as their end is unknown

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def add_up(costs: Iterable[RunCost], key: By) -> tuple[Total, ...]:
    """Sum up costs per user, team or model, sorted by price, then by hours, descending."""
    groups: dict[str, list[RunCost]] = {}
    for cost in costs:
        groups.setdefault(getattr(cost, key), []).append(cost)
    totals = [total(name, runs) for name, runs in groups.items()]
    return tuple(sorted(totals, key=lambda each: (-(each.usd or 0.0), -each.hours, each.name)))


def total(name: str, costs: Iterable[RunCost]) -> Total:
    """Sum up all runs."""
    costs = list(costs)
    spans = [span for cost in costs for span in cost.spans]
    ended = [(span, span.hours) for span in spans if span.hours is not None]
    priced = [hours * span.usd_per_hour for span, hours in ended if span.usd_per_hour is not None]
    return Total(
        name=name,
        runs=len(costs),
        hours=fsum(hours for _, hours in ended),
        failed_hours=fsum(hours for span, hours in ended if span.failed),
        usd=fsum(priced) if priced else None,
        unpriced_hours=fsum(hours for span, hours in ended if span.usd_per_hour is None),
        unfinished=len(spans) - len(ended),
    )


def parse_since(since: str, now: datetime) -> datetime:
    """Parse ``30d``, ``12h``, ``2w`` or a date to a point in time. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+)([hdw])", since.strip())
    try:
        if match is not None:
            return now - int(match[1]) * _UNITS[match[2]]
        day = datetime.fromisoformat(since.strip())
    except (ValueError, OverflowError):
        raise UserError(
            f"--since {since} is neither a duration nor a date.",
            "Write --since 30d (h, d, w), or --since 2026-11-01.",
        ) from None
    return day if day.tzinfo is not None else day.replace(tzinfo=timezone.utc)
