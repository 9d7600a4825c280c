"""Interruption rate of spot nodes: set by the user, from ``data/interruptions.csv``, or unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows
from estimator.option_checks import check_above_zero

TABLE = Path(__file__).parents[1] / "data" / "interruptions.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Interruptions per spot node and hour; None: unknown, and ``where`` names a source."""

    per_node_hour: float | None
    source: str
    where: str = "the cloud"


NO_RATE = Rate(per_node_hour=None, source="")


def rate_of(cloud: str | None, machine: str, user_rate: float | None = None) -> Rate:
    """Return the rate set by the user, otherwise that of the table for this instance type."""
    if user_rate is not None:
        return Rate(per_node_hour=user_rate, source="as given")
    for row in _rows():
        if row["cloud"] == cloud and re.match(row["machines"], machine, re.IGNORECASE):
            rate = float(row["per_node_hour"]) if row["per_node_hour"] else None
            return Rate(per_node_hour=rate, source=row["source"], where=row["where"])
    return NO_RATE


def check_rate(rate: float | None) -> None:
    """Raise UserError for an invalid hourly rate."""
    if rate is not None:
        check_above_zero(
            "interruption_rate", rate, "interruptions of one node per hour (0.05: one in 20 hours)"
        )


@lru_cache(maxsize=1)
def _rows() -> list[dict[str, str]]:
    return load_rows(TABLE)
