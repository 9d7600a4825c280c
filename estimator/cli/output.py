"""Output of the command line: rich text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator import terminal
from estimator.errors import UserError
from estimator.terminal import print

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST = 80  # columns, for narrower terminals and for pipes


def console() -> Console:
    """Return a console on standard output, with colors only in a terminal."""
    plain = terminal.console(soft_wrap=False)
    return plain if plain.width >= NARROWEST else terminal.console(width=NARROWEST)


def print_json(value: Any) -> None:
    """Write a value as indented JSON to standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV to standard output.

    The header has all columns of all rows, in order of first appearance; None is an empty cell.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    terminal.write_data(text.getvalue())


def note(text: str) -> None:
    """Write a line to standard error, to keep it out of JSON and CSV output."""
    print(text, file=sys.stderr)


def one_format(**formats: bool) -> None:
    """Raise UserError if several output formats are requested."""
    flags = [f"--{name}" for name, requested in formats.items() if requested]
    if len(flags) > 1:
        raise UserError(f"{' and '.join(flags)} exclude each other.", "Choose one.")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a file; raises UserError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.", "Choose another file.") from None


def make_output_folder(path: Path) -> None:
    """Create a folder and its parents; raises UserError if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create {path}: {error.strerror}.", "Choose another folder.") from None
