"""Recommended actions for XID codes: NVIDIA's catalogue as a data table with its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from estimator.data import load_rows, parse_row

FILE = Path(__file__).with_name("xids.csv")
Action = Literal["MONITOR", "RESET", "REBOOT", "ISOLATE"]
ACTIONS: tuple[Action, ...] = get_args(Action)  # in ascending severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """One row of NVIDIA's catalogue of XID errors, and its consequence for the node."""

    code: int
    name: str
    action: Action
    """MONITOR: at most the application ends; the others take the GPU or the node out of service."""
    catalogue: str
    """The immediate action in the catalogue's wording."""
    source: str
    date: str
    """Date on which the catalogue was read."""


@cache
def table() -> dict[int, Xid]:
    """Load all rows by code, without codes marked unused in the catalogue."""
    return {int(row["code"]): Xid(**parse_row(Xid, row)) for row in load_rows(FILE)}


def action(code: int) -> Action:
    """Return the action for a code; MONITOR if the code is unknown."""
    return table()[code].action if code in table() else "MONITOR"


def describe(code: int) -> str:
    """Format an XID's code with its name in the catalogue."""
    return f"{code} ({table()[code].name})" if code in table() else f"{code} (not in the catalogue's table)"
