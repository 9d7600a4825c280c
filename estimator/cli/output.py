"""How answers leave the program: rich text, JSON, CSV; figures as people read them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST = 80  # columns, where the output is no terminal or a narrower one


def console() -> Console:
    """Standard output; colours only where it is a terminal."""
    from rich.console import Console

    plain = Console(highlight=False, soft_wrap=False)
    return plain if plain.width >= NARROWEST else Console(highlight=False, width=NARROWEST)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with a header of all their columns, in the order in which they first come; None is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def note(text: str) -> None:
    """A line beside the answer, which must not end up in it."""
    print(text, file=sys.stderr)


def one_format(**formats: bool) -> None:
    """Raise UserError where two output formats are asked for."""
    flags = [f"--{name}" for name, requested in formats.items() if requested]
    if len(flags) > 1:
        raise UserError(f"{' and '.join(flags)} are two formats for one output.", "Choose one.")


def write_text(path: Path, text: str) -> None:
    """Write a file whole; raises UserError where that is not possible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} can't be written: {error.strerror or error}.", "Name another file."
        ) from None


def hours(value: float) -> str:
    return f"{value * 60:.0f} min" if value < 2 else f"{value:,.1f} h"


def usd(value: float) -> str:
    return f"${value:,.2f}"
