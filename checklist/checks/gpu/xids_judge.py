"""Recommended actions for XID codes: NVIDIA's catalogue as a data table with its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

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
    with FILE.open(newline="", encoding="utf-8") as file:
        return {int(row["code"]): _xid(row) for row in csv.DictReader(file)}


def _xid(row: dict[str, str]) -> Xid:
    known_action = next(action for action in ACTIONS if action == row["action"])
    return Xid(
        code=int(row["code"]),
        name=row["name"],
        action=known_action,
        catalogue=row["catalogue"],
        source=row["source"],
        date=row["date"],
    )


def action(code: int) -> Action:
    """Return the action for a code; MONITOR if the code is unknown."""
    return table()[code].action if code in table() else "MONITOR"


def describe(code: int) -> str:
    """Format an XID's code with its name in the catalogue."""
    return f"{code} ({table()[code].name})" if code in table() else f"{code} (not in the catalogue's table)"
