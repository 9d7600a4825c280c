"""Reader of a table of measurements: CSV lines as cells of text, numbers and flags."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.vocabulary import UnsupportedRow
from estimator.errors import UserError

NEEDED = (
    "id",
    "source",
    "model",
    "method",
    "framework",
    "gpu",
    "n_gpus",
    "micro_batch",
    "seq_len",
    "mem_kind",
    "peak_mem_GiB",
    "tps_per_gpu",
    "quality",
)
_BLANK = ("", "n/a", "na", "-", "none", "nan", "?", "unknown")
MEASURED = ("peak_mem_GiB", "gib_min", "gib_max", "tps_per_gpu", "micro_batch", "seq_len", "n_gpus")


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of one row. A blank cell, or a placeholder such as "n/a", is "" or None."""

    file: str
    line: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell's text."""
        value = self.values.get(column, "")
        return "" if value.lower() in ("n/a", "na", "-", "?") else value

    def number(self, column: str) -> float | None:
        """Return a cell's number, at least 0.

        Any other text raises UserError in a column of measurements and UnsupportedRow in other columns.
        """
        text = self.values.get(column, "")
        if text.lower() in _BLANK:
            return None
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            value = -1.0
        if 0 <= value < float("inf"):
            return value
        if column in MEASURED:
            raise UserError(
                f"{self.file}, line {self.line}: {column} = {text!r} is not a number of at least 0.",
                "Leave the cell blank where the value is unknown.",
            )
        raise UnsupportedRow(f"{column} = {text!r} is not a number")

    def whole(self, column: str) -> int | None:
        """Return a cell's whole number; raise UnsupportedRow for a fraction."""
        value = self.number(column)
        if value is not None and value != int(value):
            raise UnsupportedRow(f"{column} = {self.values[column]!r} is not a whole number")
        return None if value is None else int(value)

    def flag(self, column: str) -> bool | None:
        """Return a cell as a boolean: False for "0", "no", "off" and the like, True for any other text."""
        text = self.text(column).lower()
        return None if not text else text not in ("0", "0.0", "false", "no", "none", "off")


def read(path: Path) -> list[Cells]:
    """Read the rows below the header.

    Raises :class:`UserError` for a file that is missing, is not CSV, lacks a column of ``NEEDED``, is empty
    or has a line with too few or too many cells.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if not missing:
                rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}.", "Give a table of measurements."
        ) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} is not a CSV file: {error}.", "Give a table of measurements.") from None
    if missing:
        some = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
        raise UserError(
            f"{path.name} has no column {some}.",
            "Its first line must name the columns of a table of measurements, as data/measured.csv does.",
        )
    if not rows:
        raise UserError(f"{path.name} has no row below its header.", "Give at least one measurement.")
    for line, row in rows:
        if None in row or None in row.values():
            raise UserError(
                f"{path.name}, line {line}: it has not as many cells as the header.",
                "Quote cells that have a comma in them.",
            )
    return [Cells(path.name, line, {key: value.strip() for key, value in row.items()}) for line, row in rows]
