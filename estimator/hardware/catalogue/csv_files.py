"""Reader of the user's hardware tables, with errors that name the cell."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from estimator.errors import UserError
from estimator.formatting import MIB, format_bytes
from estimator.hardware.catalogue import normalize
from estimator.hardware.catalogue.columns import GPU, INSTANCE, Column, stem
from estimator.names import did_you_mean

Cells = dict[str, str]  # one row by column; blank cells are omitted
Kind = Literal["gpu", "instance"]
KIND_COLUMN = "kind"
# Reported / marketed memory of a card: 0.93 (L4) to 1.07 (marketed GB as GiB), with a margin.
REPORTED_TO_LABEL = (0.85, 1.15)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareRow:
    """One line of a hardware table of the user; blank cells are omitted from ``cells``."""

    file: Path
    line: int
    kind: Kind
    cells: Cells

    def cell_error(self, column: str, rule: str, advice: str = "") -> UserError:
        """Return a UserError that names file, line, column and value, and the violated ``rule``."""
        value = self.cells.get(column)
        quoted = "" if value is None else f" {value!r}"
        return UserError(f"{self.file}, line {self.line}, column {column}:{quoted} {rule}.", advice)


def read_rows(file: Path) -> list[HardwareRow]:
    """Read the rows of a hardware table, and check each cell.

    Raises UserError, naming file, line and column, for an unreadable file, an unknown column, an invalid cell
    and a duplicate name.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.reader(stream, strict=True)
            header = [name.strip() for name in next(lines, [])]
            kinds = _kinds(file, header)
            rows = [
                _row(file, lines.line_num, header, kinds, [cell.strip() for cell in cells])
                for cells in lines
                if any(cell.strip() for cell in cells)
            ]
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {error.strerror or error}.", "Use a CSV file (docs/hardware.md)."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} is not a CSV file in UTF-8: {error}.", "Save it as CSV, UTF-8.") from None
    _check_unique(rows)
    return rows


def _kinds(file: Path, header: list[str]) -> tuple[Kind, ...]:
    """Return the kinds of rows that the header of a file allows; each column belongs to one of them."""
    place = f"{file}, line 1"
    if not any(header):
        raise UserError(f"{place}: there are no column names.", "The first line names the columns.")
    if len(header) == 1 and re.search(r"[;\t]", header[0]):
        raise UserError(f"{place}: the columns are not separated by commas.", "Save it with commas.")
    kinds: tuple[Kind, ...] = (
        ("gpu", "instance")
        if KIND_COLUMN in header
        else ("instance",)
        if "instance_type" in header or "cloud" in header
        else ("gpu",)
    )
    allowed = {name for kind in kinds for name in _columns(kind)} | {KIND_COLUMN}
    for name in header:
        if name not in allowed:
            raise _unknown_column(place, name, allowed - {KIND_COLUMN})
        if header.count(name) > 1:
            raise UserError(f"{place}, column {name}: duplicate column.", "Remove one of them.")
    return kinds


def _unknown_column(place: str, name: str, allowed: set[str]) -> UserError:
    similar = sorted(column for column in allowed if stem(column) == stem(name))
    similar += [
        column for column in sorted(allowed) if column.lower() == name.lower() and column not in similar
    ]
    if similar and similar[0].lower() != name.lower():
        return UserError(
            f"{place}, column {name}: wrong unit: the table has {' and '.join(similar)}.",
            f"Convert the values and call the column {similar[0]}.",
        )
    return UserError(
        f"{place}, column {name or '(blank)'}: unknown column.",
        did_you_mean(name, sorted(allowed)) or f"The columns are {', '.join(sorted(allowed))}.",
    )


def _columns(kind: Kind) -> Mapping[str, Column]:
    return GPU if kind == "gpu" else INSTANCE


def _row(file: Path, line: int, header: list[str], kinds: tuple[Kind, ...], values: list[str]) -> HardwareRow:
    if len(values) > len(header):
        raise UserError(
            f"{file}, line {line}: it has {len(values)} values for {len(header)} columns.",
            'Put values with a comma into quotes ("...").',
        )
    cells = {name: value for name, value in zip(header, values, strict=False) if value}
    kind = kinds[0]
    if len(kinds) > 1:
        kind_cell = cells.get(KIND_COLUMN, "").lower()
        unchecked = HardwareRow(file=file, line=line, kind=kind, cells=cells)
        if kind_cell not in kinds:
            raise unchecked.cell_error(
                KIND_COLUMN, "is not known" if kind_cell else "is missing", "It takes gpu or instance."
            )
        kind = "gpu" if kind_cell == "gpu" else "instance"
        del cells[KIND_COLUMN]
    row = HardwareRow(file=file, line=line, kind=kind, cells=cells)
    columns = _columns(kind)
    for name, value in cells.items():
        if name not in columns:
            raise row.cell_error(name, f"is not a column of {kind} rows", "Leave it blank there.")
        fault = columns[name].fault(value)
        if fault is not None:
            raise row.cell_error(name, *fault)
    key = "gpu" if kind == "gpu" else "instance_type"
    if key not in cells:
        raise row.cell_error(key, "is missing", "It identifies the row.")
    names = [cells["gpu"]] if kind == "gpu" else []
    for name in (*names, *aliases_of(cells)):
        if not normalize(name):
            raise row.cell_error(
                "gpu" if name in names else "aliases", f"has {name!r}, which is not a name", ""
            )
    check_sizes(row)
    return row


def check_sizes(row: HardwareRow) -> None:
    """Raise UserError if reported and marketed memory of a GPU differ too much (``REPORTED_TO_LABEL``)."""
    reported, label = number(row.cells, "vram_reported_MiB"), number(row.cells, "vram_GB")
    if reported is None or label is None:
        return
    low, high = REPORTED_TO_LABEL
    if not low * label <= reported / 1024 <= high * label:
        raise row.cell_error(
            "vram_reported_MiB",
            f"is {format_bytes(reported * MIB)}, which contradicts vram_GB = {label:g}",
            "Both belong to the same GPU. If the table has the other one, give both.",
        )


def _check_unique(rows: list[HardwareRow]) -> None:
    first_lines: dict[tuple[str, str], int] = {}
    for row in rows:
        column = "gpu" if row.kind == "gpu" else "instance_type"
        name = row.cells[column]
        first = first_lines.setdefault(
            (row.kind, normalize(name) if row.kind == "gpu" else name.lower()), row.line
        )
        if first != row.line:
            raise row.cell_error(column, f"duplicates line {first}", "Remove one of them.")


def number(cells: Cells, column: str) -> float | None:
    """Return the number in a cell, of "16 or 32" the first; None if the cell is blank."""
    text = cells.get(column)
    return None if text is None else float(text.split(" or ")[0])


def aliases_of(cells: Cells) -> list[str]:
    """Return the aliases of a GPU, from the cell ``aliases``, separated by semicolons."""
    return [name.strip() for name in cells.get("aliases", "").split(";") if name.strip()]
