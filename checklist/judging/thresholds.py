"""Minimum values of figures on known systems: a table with sources, preceded by a user's rows.

A row applies only to its key: system, operation, size, algorithm, GPUs per node, nodes. Without a matching
row there is no threshold; nothing is scaled or extrapolated from another row.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from checklist.analysis.busbw import OPS
from checklist.registry import LOCALS
from estimator.errors import UserError
from estimator.names import did_you_mean

SHIPPED = Path(__file__).parents[1] / "data" / "thresholds.csv"
COLUMNS = (
    "system",
    "op",
    "min_bytes",
    "max_bytes",
    "algorithm",
    "gpus",
    "nodes",
    "floor",
    "warn",
    "unit",
    "kind",
    "measured",
    "source",
)
NEEDED = ("system", "op", "floor", "source")
KINDS = ("published", "proposal")
ROUNDED = 1.001  # tolerance for sizes, because messages are cut to a multiple of the ranks
PAIR = "pair"  # operation: one node to another, one direction
_RANGE = re.compile(r"(\d+)(-(\d*))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Integers from ``low`` to ``high``, both inclusive; None: unbounded."""

    low: int = 0
    high: int | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        return self.low <= value and (self.high is None or value <= self.high)

    @property
    def bounded(self) -> bool:
        return self != Span()


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Key of a threshold lookup. None: unknown, or not applicable to this figure."""

    systems: tuple[str, ...]
    """Names of this system, most specific first: machine type, GPU, network."""
    op: str
    bytes: int | None = None
    algorithm: str | None = None
    gpus: int | None = None
    """GPUs per node."""
    nodes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """One row. Higher is better in all rows; ``floor`` and ``warn`` are in ``unit``."""

    system: str
    op: str
    sizes: Span
    algorithm: str | None
    gpus: Span
    nodes: Span
    floor: float
    warn: float | None
    unit: str
    kind: Literal["published", "proposal"]
    """"proposal": the source measured it, and this package set the floor."""
    measured: float | None
    source: str
    own: bool = False
    """Whether the row is from the user's file."""

    def fits(self, key: Key) -> bool:
        """Return whether the row applies; an unknown part of the key matches only a row without that part."""
        return (
            self.system.lower() in {name.lower() for name in key.systems}
            and self.op == key.op
            and self.algorithm in (None, key.algorithm)
            and _covers(self.sizes, None if key.bytes is None else round(key.bytes * ROUNDED))
            and _covers(self.gpus, key.gpus)
            and _covers(self.nodes, key.nodes)
        )

    @property
    def origin(self) -> str:
        return f"{self.source}, {'your file' if self.own else self.kind}"


def _covers(span: Span, value: int | None) -> bool:
    return not span.bounded if value is None else value in span


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in lookup order: the user's before the shipped ones."""

    rows: tuple[Threshold, ...]

    def find(self, key: Key) -> Threshold | None:
        """Return the row for the key, or None.

        Precedence: the user's rows, then the more specific name of the system, then a row for this algorithm,
        then the row for larger messages.
        """
        order = {name.lower(): index for index, name in enumerate(key.systems)}
        return min(
            (row for row in self.rows if row.fits(key)),
            key=lambda row: (not row.own, order[row.system.lower()], row.algorithm is None, -row.sizes.low),
            default=None,
        )


def table(user_file: Path | None = None) -> Table:
    """Load the user's rows followed by the shipped ones. Raises UserError for a bad file."""
    rows = () if user_file is None else read(user_file, user=True)
    return Table((*rows, *_shipped()))


@cache
def _shipped() -> tuple[Threshold, ...]:
    return read(SHIPPED)


def read(file: Path, *, user: bool = False) -> tuple[Threshold, ...]:
    """Read the rows of a CSV file. Raises UserError with line, column and value of the first mistake."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.DictReader(stream, restkey="", restval="", strict=True)
            _check_header(file, lines.fieldnames)
            rows = [(lines.line_num, cells) for cells in lines]
    except OSError as error:
        raise UserError(
            f"The thresholds {file} cannot be read: {error.strerror or error}.",
            "Give a CSV file with the columns of checklist/data/thresholds.csv.",
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} is not a CSV file in UTF-8: {error}.", "Save it as CSV, UTF-8.") from None
    return tuple(_Line(file, number, cells).threshold(user=user) for number, cells in rows)


def _check_header(file: Path, names: Iterable[str] | None) -> None:
    columns = list(names or ())
    for name in columns:
        if name not in COLUMNS:
            raise UserError(
                f"{file}, line 1, column {name!r}: there is no such column.",
                f"{did_you_mean(name, COLUMNS)} The columns are {', '.join(COLUMNS)}.".lstrip(),
            )
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UserError(
            f"{file}, line 1: the column {missing[0]} is missing.",
            f"A file of thresholds needs {', '.join(NEEDED)}.",
        )


class _Line:
    """One line of a file, whose cells are validated on access."""

    def __init__(self, file: Path, number: int, cells: dict[str, str]) -> None:
        if "" in cells:
            raise UserError(
                f"{file}, line {number}: there are more values than columns.",
                'Put a value that has a comma into quotes ("...").',
            )
        self.where = f"{file}, line {number}"
        self.cells = {name: value.strip() for name, value in cells.items()}

    def threshold(self, *, user: bool) -> Threshold:
        op = self._one_of("op", (*OPS, *LOCALS, PAIR)) or ""
        unit = LOCALS[op].unit if op in LOCALS else "GB/s"
        if self.cells.get("unit", unit) not in ("", unit):
            raise self._bad("unit", f"must be {unit} for {op}")
        floor, warn = self._number("floor"), self._number("warn")
        if floor is None:
            raise self._bad("floor", "is missing")
        if warn is not None and warn < floor:
            raise self._bad("warn", f"is below the floor {floor:g}")
        low, high = self._number("min_bytes"), self._number("max_bytes")
        if low is not None and high is not None and high < low:
            raise self._bad("max_bytes", f"is below min_bytes {low:g}")
        kind = self._one_of("kind", KINDS) or "proposal"
        return Threshold(
            system=self._text("system"),
            op=op,
            sizes=Span(low=int(low or 0), high=None if high is None else int(high)),
            algorithm=self.cells.get("algorithm") or None,
            gpus=self._span("gpus"),
            nodes=self._span("nodes"),
            floor=floor,
            warn=warn,
            unit=unit,
            kind="published" if kind == "published" else "proposal",
            measured=self._number("measured"),
            source=self._text("source"),
            own=user,
        )

    def _bad(self, column: str, rule: str, advice: str = "") -> UserError:
        value = self.cells.get(column, "")
        return UserError(
            f"{self.where}, column {column}: {value!r} {rule}.",
            advice or "Correct that cell; checklist/data/thresholds.csv shows how rows look.",
        )

    def _text(self, column: str) -> str:
        value = self.cells.get(column, "")
        if not value:
            raise self._bad(column, "is missing")
        return value

    def _one_of(self, column: str, choices: tuple[str, ...]) -> str | None:
        value = self.cells.get(column, "")
        if value in choices or (not value and column not in NEEDED):
            return value or None
        advice = f"{did_you_mean(value, choices)} It takes {', '.join(choices)}.".lstrip()
        raise self._bad(column, "is not known", advice)

    def _number(self, column: str) -> float | None:
        value = self.cells.get(column, "")
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            raise self._bad(column, "is not a number") from None
        if not (math.isfinite(number) and number >= 0):
            raise self._bad(column, "is not a number from 0 up")
        return number

    def _span(self, column: str) -> Span:
        value = self.cells.get(column, "")
        if not value:
            return Span()
        span = _RANGE.fullmatch(value)
        if span is None:
            raise self._bad(column, "is not a number or a range", "Write 8, 2-4 or 2- (and more).")
        low, ranged, high = int(span[1]), span[2] is not None, span[3]
        if high and int(high) < low:
            raise self._bad(column, "ends before it begins")
        return Span(low=low, high=(int(high) if high else None) if ranged else low)
