"""Tables of facts: CSV files that state a source for each row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "1".__eq__}


def load_rows(table: Path) -> list[dict[str, str]]:
    """Read the rows of a shipped table by column name."""
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def parse_row(kind: type, row: Mapping[str, str]) -> dict[str, Any]:
    """Parse the cells named like fields of a dataclass, by the field's type; blank cells are omitted.

    The types are read as text: the dataclass's module must have ``from __future__ import annotations``.
    """
    types = {name: str(hint).partition(" ")[0] for name, hint in kind.__annotations__.items()}
    return {
        name: _PARSERS.get(types[name], str)(text) for name, text in row.items() if text and name in types
    }
