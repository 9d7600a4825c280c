"""Iteration over the rows of a file in any supported format, without loading it into memory.

* JSONL: one JSON object per line
* JSON: a list of objects, or consecutive objects, with any formatting
* ``.csv`` and ``.tsv``: the first line contains the column names; an empty cell is a missing key
* ``.parquet``
* a folder with one split, written by ``save_to_disk`` of the ``datasets`` package
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from estimator.errors import UserError
from estimator.untrusted import MAX_DEPTH, DeepError, check_depth, parse_json, plain_name, read_text
from launchers.dataset.parquet_limits import BATCH_BYTES, ParquetLimits
from launchers.dataset.readable import NOT_UTF_8, check_readable

FORMS = (
    "JSONL, a JSON list, CSV (.csv, .tsv), Parquet (.parquet), a folder of datasets' save_to_disk, or for "
    "task pretrain plain text (.txt)"
)
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")  # of dataset files
_SAVED_BATCH = 100  # rows
_SAVED = "state.json"  # identifies a save_to_disk folder with one split; several: dataset_dict.json
_CHUNK = 1 << 20  # characters of a JSON list read at a time
_TOO_LARGE = f"its lists have more than {BATCH_BYTES // 2**20} MiB of text"
_DECLARED_SEPARATOR = re.compile(r"sep=([,;\t|])\s*")  # first line of some exports, read by Excel
_BLANK = re.compile(r"[ \t\r\n]*")
# An error this near to the end of the buffer may be caused by a value that continues after it
_TAIL_CHARS = 16


class BadRow(Exception):  # noqa: N818
    """Reason why a row is unusable."""


class Rows(ABC):
    """Iterable over a file: (number, decoded row), or (number, BadRow) for rows that cannot be decoded."""

    unit = "row"  # what the numbers count, for messages

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, Any]]: ...

    @abstractmethod
    def share(self) -> float:
        """Return the fraction of the file read so far, from 0 to 1."""


def open_rows(path: Path, columns: Sequence[str] | None = None) -> Rows:
    """Open a file or folder of rows; raises UserError for an unknown format.

    ``columns``: the only columns to read from a Parquet file.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        if not is_saved(path):
            raise UserError(f"Dataset {path} is a folder without rows.", f"Use {FORMS}.")
        return _SavedDataset(path)
    try:
        with path.open("rb") as file:
            beginning = file.read(4096)
    except OSError as error:
        raise UserError(f"Dataset {path} cannot be read: {error.strerror}.") from None
    check_readable(path, beginning)
    if beginning.startswith(b"PAR1") or suffix == ".parquet":
        return _Parquet(path, columns)
    binary = b"\0" in beginning
    if suffix in (".csv", ".tsv") and not binary:
        return _Csv(path)
    first = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[" and not binary:
        return _Json(path)
    supported = suffix in SUFFIXES or first in (b"{", b"")
    if binary or not supported:
        raise UserError(f"Dataset {path} has an unknown format.", f"Use {FORMS}.")
    return _Json(path) if first == b"{" and not _may_be_complete(beginning) else _Lines(path)


def is_saved(folder: Path) -> bool:
    """Whether the folder is a single split written by save_to_disk."""
    return (folder / _SAVED).is_file()


def _may_be_complete(beginning: bytes) -> bool:
    """Whether the first line may be a complete JSON object, as in JSONL, not the beginning of one."""
    line = beginning.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0].rstrip()
    return line not in (b"{", b"{}") and not line.endswith((b",", b"[", b"{"))


class _Lines(Rows):
    """JSONL file; blank lines are skipped."""

    unit = "line"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        with self.path.open("rb") as self._file:
            for number, line in enumerate(self._file, start=1):
                if line.strip():
                    yield number, _decode_line(line, number)

    def share(self) -> float:
        return self._file.tell() / max(1, self.path.stat().st_size)


def _decode_line(line: bytes, number: int) -> Any:
    """Decode a line of JSONL; return a BadRow if that fails."""
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip(), cls=_Decoder)
        return check_depth(value) if line.count(b"[") + line.count(b"{") > MAX_DEPTH else value
    except json.JSONDecodeError as error:
        return BadRow(f"not JSON ({error.msg} at column {error.colno})")
    except UnicodeDecodeError as error:
        return BadRow(f"{NOT_UTF_8} (byte {error.start + 1})")
    except _Unusable as error:
        return BadRow(str(error))
    except (RecursionError, DeepError):
        return BadRow("JSON that is nested too deeply")


class _Unusable(ValueError):  # noqa: N818 - as BadRow
    """JSON with contradictory or unsupported values."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raises for duplicate keys, of which Python would silently use the last."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _Unusable(f"the key `{name}` is repeated")
        values[name] = value
    return values


def _parse_integer(digits: str) -> int:
    """Parse a JSON integer; raises for more digits than Python converts."""
    try:
        return int(digits)
    except ValueError:  # sys.get_int_max_str_digits
        raise _Unusable(f"a number of {len(digits):,} digits") from None


class _Decoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_build_object, parse_int=_parse_integer)


class _TextFile(Rows):
    """Text file that is read piece by piece."""

    _file: TextIO

    def share(self) -> float:
        # A text file has no position during iteration; its file descriptor does
        position = os.lseek(self._file.fileno(), 0, os.SEEK_CUR) if not self._file.closed else 0
        return position / max(1, self.path.stat().st_size)


def _undecodable_line(path: Path) -> tuple[int, BadRow]:
    """Return the first line that is not UTF-8, as a bad row with its number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            position = _undecodable_byte(line)
            if position is not None:
                return number, BadRow(f"{NOT_UTF_8} (byte {position})")
    raise UserError(f"Dataset {path} changed while it was read.", "Run again.")


def _undecodable_byte(line: bytes) -> int | None:
    """Return the position of the first byte that is not UTF-8, counted from 1; None if there is none."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.start + 1
    return None


class _Json(_TextFile):
    """JSON list, or consecutive JSON values; reading ends at the first syntax error."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        with self.path.open(encoding="utf-8-sig") as self._file:
            self._cursor, self._count = _Cursor(self._file), 0
            try:
                yield from self._rows()
            except json.JSONDecodeError as error:
                line = self._cursor.line_of(error.pos)
                yield self._number, BadRow(f"not JSON ({error.msg}, line {line})")
            except UnicodeDecodeError:
                self.unit = "line"
                yield _undecodable_line(self.path)
            except _Unusable as error:
                yield self._number, BadRow(str(error))
            except (RecursionError, DeepError):
                yield self._number, BadRow("JSON that is nested too deeply")

    @property
    def _number(self) -> int:
        """Number of the next row: its first line, or its index in a file without line breaks."""
        return self._cursor.line if self.unit == "line" else self._count + 1

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Iterate over (number, row); raises an error at the first invalid value."""
        cursor = self._cursor
        is_list = cursor.peek() == "["
        if is_list:
            cursor.skip()
        cursor.peek()
        if cursor.line > 1 or not is_list:
            self.unit = "line"
        while (next_character := cursor.peek()) and not (is_list and next_character == "]"):
            if self._count and (is_list or next_character == ","):
                cursor.expect(",")
                cursor.peek()
            number, value = self._number, cursor.value()
            yield number, value
            self._count += 1
        if is_list:
            cursor.expect("]")
            if cursor.peek():
                yield self._number, BadRow("not JSON (more text after the list)")


class _Cursor:
    """Position in a text that is read piece by piece."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._decoder = file, _Decoder()
        self._text, self._at, self.line = "", 0, 1

    def peek(self) -> str:
        """Skip white space, and return the next character without consuming it; empty at the end."""
        while True:
            self._go_to(_BLANK.match(self._text, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def skip(self) -> None:
        """Move past the current character."""
        self._go_to(self._at + 1)

    def expect(self, character: str) -> None:
        """Move past ``character``; raises JSONDecodeError if the next one differs."""
        if self.peek() != character:
            raise json.JSONDecodeError(f"Expecting '{character}'", self._text, self._at)
        self.skip()

    def value(self) -> Any:
        """Parse the JSON value at the cursor; raises JSONDecodeError."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string")
                if (unfinished or error.pos > len(self._text) - _TAIL_CHARS) and self._read_more():
                    continue
                raise
            if isinstance(value, int | float) and end > len(self._text) - _TAIL_CHARS and self._read_more():
                continue  # the number may continue
            start = self._at
            self._go_to(end)
            if self._text.count("[", start, end) + self._text.count("{", start, end) > MAX_DEPTH:
                check_depth(value)
            return value

    def line_of(self, position: int) -> int:
        """Return the line number of a position in the buffered text."""
        return self.line + self._text.count("\n", self._at, position)

    def _go_to(self, position: int) -> None:
        """Move the cursor forward, and count the lines on the way."""
        self.line += self._text.count("\n", self._at, position)
        self._at = position

    def _read_more(self) -> bool:
        """Append the next piece of the file to the buffer; return False at the end of the file."""
        remaining = self._text[self._at :]
        chunk = self._file.read(max(_CHUNK, len(remaining)))
        if chunk:
            self._text, self._at = remaining + chunk, 0
        return bool(chunk)


class _Csv(_TextFile):
    """CSV with a header; the separator is a comma, or the most frequent one in the header."""

    unit = "line"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        csv.field_size_limit(2**31 - 1)
        number = 1
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as self._file:
                header = self._file.readline()
                declared = _DECLARED_SEPARATOR.fullmatch(header)
                if declared is None:
                    self._file.seek(0)
                delimiter = self._delimiter(header) if declared is None else declared[1]
                skipped = int(declared is not None)
                rows = csv.reader(self._file, delimiter=delimiter, strict=True)
                columns = self._parse_header(next(rows, []))
                number = skipped + rows.line_num + 1
                for cells in rows:
                    if cells:
                        yield number, self._row(columns, cells)
                    number = skipped + rows.line_num + 1
        except csv.Error as error:
            yield number, BadRow(f"not CSV ({error})")
        except UnicodeDecodeError:
            yield _undecodable_line(self.path)

    def _delimiter(self, header: str) -> str:
        if self.path.suffix.lower() == ".tsv":
            return "\t"
        return max(",;\t|", key=header.count)  # the first one if several are equally frequent

    def _parse_header(self, names: list[str]) -> list[str]:
        columns = [name.strip() for name in names]
        duplicates = sorted(name for name, times in Counter(columns).items() if times > 1)
        if duplicates:
            raise UserError(f"Dataset {self.path} has two columns `{duplicates[0]}`.", "Rename one of them.")
        return columns

    @staticmethod
    def _row(columns: list[str], cells: list[str]) -> Any:
        if len(cells) != len(columns):
            fields = "1 field" if len(cells) == 1 else f"{len(cells)} fields"
            return BadRow(f"{fields}, but the header names {len(columns)}")
        return {name: cell for name, cell in zip(columns, cells, strict=True) if cell}


class _Parquet(Rows):
    """Parquet file, decoded in batches."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        super().__init__(path)
        self._columns, self._share = columns, 0.0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UserError(
                f"Dataset {self.path}: Parquet needs the `pyarrow` package, which is not installed.",
                "pip install pyarrow",
            ) from None
        try:
            with parquet.ParquetFile(self.path) as file:
                total, number = file.metadata.num_rows, 0
                present = file.schema_arrow.names
                limits = ParquetLimits(self.path, file)
            columns = None if self._columns is None else [name for name in self._columns if name in present]
            with parquet.ParquetFile(self.path, read_dictionary=limits.dictionary_columns) as file:
                batches = (  # nested dictionaries may not continue in another row group
                    batch
                    for group in range(file.metadata.num_row_groups)
                    for batch in file.iter_batches(limits.batch, row_groups=[group], columns=columns or None)
                )
                for part in itertools.chain.from_iterable(map(limits.rows, batches)):
                    for row in [BadRow(_TOO_LARGE)] if part is None else _to_rows(part):
                        number += 1
                        self._share = number / total
                        yield number, row
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"Dataset {self.path} cannot be read as Parquet: {reason}",
                "Write or download the file again.",
            ) from None

    def share(self) -> float:
        return self._share


def _to_rows(batch: Any) -> list[Any]:
    """Convert an Arrow batch to rows; a row that cannot be represented in Python becomes a BadRow."""
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError, RecursionError) as error:  # not UTF-8, a date after the year 9999
        if batch.num_rows == 1:
            reason = NOT_UTF_8 if isinstance(error, UnicodeDecodeError) else str(error)
            return [BadRow(reason)]
        return [row for number in range(batch.num_rows) for row in _to_rows(batch.slice(number, 1))]
    return rows


class _SavedDataset(Rows):
    """Memory-mapped split in a folder written by ``save_to_disk``."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        try:
            import datasets
            from pyarrow import ArrowException
        except ImportError:
            raise UserError(
                f"Dataset {self.path}: save_to_disk's folders need the `datasets` package, which is not "
                "installed.",
                "pip install 'metaflow-finetune[train]'",
            ) from None
        try:
            for file in parse_json(read_text(self.path / _SAVED))["_data_files"]:
                plain_name(file["filename"])
            saved = datasets.load_from_disk(str(self.path))
            self._total, self._done = len(saved), 0
            for table in saved.with_format("arrow").iter(_SAVED_BATCH):  # "arrow": images stay encoded
                for row in _to_rows(table):
                    self._done += 1
                    yield self._done, row
        except (OSError, ValueError, KeyError, TypeError, OverflowError, ArrowException) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"Dataset {self.path} cannot be read: {reason}") from None

    def share(self) -> float:
        return self._done / max(1, self._total)
