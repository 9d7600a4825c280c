"""Output of the command line: rich text, JSON, CSV, and numbers formatted for people."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from estimator.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST = 80  # columns, where the output is no terminal or a narrower one


def console() -> Console:
    """Standard output; colours only where it is a terminal."""
    from rich.console import Console

    plain = Console(highlight=False, soft_wrap=False)
    return plain if plain.width >= NARROWEST else Console(highlight=False, width=NARROWEST)


def print_json(value: Any) -> None:
    """Write a value as indented JSON to standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV to standard output.

    The header has all columns of all rows, in the order in which they first come; None is an empty cell.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def note(text: str) -> None:
    """Write a line to standard error, so that it does not end up in JSON or CSV."""
    print(printable(text), file=sys.stderr)


def one_format(**formats: bool) -> None:
    """Raise UserError where two output formats are asked for."""
    flags = [f"--{name}" for name, requested in formats.items() if requested]
    if len(flags) > 1:
        raise UserError(f"{' and '.join(flags)} are two formats for one output.", "Choose one.")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as the whole file; raises UserError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} can't be written: {error.strerror or error}.", "Name another file."
        ) from None
