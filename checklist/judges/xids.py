"""What an XID code asks for: NVIDIA's catalogue as a table of data, with its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

FILE = Path(__file__).parents[1] / "data" / "xids.csv"
Action = Literal["MONITOR", "RESET", "REBOOT", "ISOLATE"]
ACTIONS: tuple[Action, ...] = get_args(Action)  # from the least to the most


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """One row of NVIDIA's catalogue of XID errors, and what it means for the node."""

    code: int
    name: str
    action: Action
    """MONITOR: the application ends, or nothing; the others take the GPU or the node out of service."""
    catalogue: str
    """The catalogue's own word for the immediate action."""
    source: str
    date: str
    """When the catalogue was read."""


@cache
def table() -> dict[int, Xid]:
    """All rows by code. Codes that the catalogue calls unused are left out."""
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
    """What that code asks for; MONITOR for one that the table doesn't know."""
    return table()[code].action if code in table() else "MONITOR"


def words(code: int) -> str:
    """An XID's code with its name in the catalogue, as text."""
    return f"{code} ({table()[code].name})" if code in table() else f"{code} (not in the catalogue's table)"
