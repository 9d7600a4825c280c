"""Limits on the decoded size of a Parquet file, against decompression bombs.

A Parquet file stores repeated values and runs of levels only once, and ``pyarrow`` decodes a batch before its
size is known. Therefore the largest value of a column limits the rows per batch, and nested text stays
dictionary-encoded until its decoded size has been computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estimator.errors import UserError

BATCH_BYTES = 64 * 2**20
"""Bytes decoded at a time; also the limit for one row with nested text."""
MAX_BATCH = 64  # rows
_MAX_COMPRESSION = 100  # maximum ratio of a codec; text is compressed to a twentieth at most in practice
_MAX_EXPANSION = 1000  # maximum ratio of a file's decoded bytes to its size
_ALWAYS_ALLOWED_BYTES = 2**30  # decoded bytes that are allowed at any ratio
_ROW_BYTES = 16  # added per row, because a row without content takes time too
_ADVICE = "If the rows are meant to be equal, write the file without compression and use_dictionary=False."


class ParquetLimits:
    """Limits for reading one file.

    ``batch``: rows to decode at a time. ``dictionary_columns``: columns to read with dictionary encoding.
    ``file``: the ``pyarrow.parquet.ParquetFile`` of ``path``.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._decoded = path, 0
        self._allowed = max(_ALWAYS_ALLOWED_BYTES, _MAX_EXPANSION * path.stat().st_size)
        self.batch = MAX_BATCH
        self.dictionary_columns = self._inspect(file)

    def _inspect(self, file: Any) -> list[str]:
        """Return the nested text columns, and limit ``batch``; raises UserError for too large columns."""
        nested = {
            number: column
            for number in range(len(file.schema))
            if (column := file.schema.column(number)).max_repetition_level
        }
        dictionary_columns = set()
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            for number, column in ((number, group.column(number)) for number in range(group.num_columns)):
                self._check_compression(column)
                repeated = _dictionary_bytes(self._path, column)
                value = max(repeated, column.total_uncompressed_size // max(1, column.num_values), 1)
                if number not in nested:
                    self.batch = max(1, min(self.batch, BATCH_BYTES // value))
                elif column.physical_type == "BYTE_ARRAY" and repeated:
                    dictionary_columns.add(column.path_in_schema)
                width = max(0, nested[number].length or 0) if number in nested else 0
                if number in nested and column.num_values * max(_ROW_BYTES, width) > self._allowed:
                    self._refuse(f"{column.path_in_schema} has {column.num_values:,} values")
        return sorted(dictionary_columns)

    def _check_compression(self, column: Any) -> None:
        expanded, stored = column.total_uncompressed_size, column.total_compressed_size
        if expanded > max(2**20, _MAX_COMPRESSION * stored):
            self._refuse(f"{column.path_in_schema} has {expanded:,} bytes, compressed to {stored:,}")

    def rows(self, batch: Any) -> list[Any]:
        """Split a batch into parts of at most ``BATCH_BYTES``; a single larger row becomes None."""
        size = sum(map(decoded_bytes, batch.columns)) + _ROW_BYTES * batch.num_rows
        if size > BATCH_BYTES and batch.num_rows > 1:
            return [part for n in range(batch.num_rows) for part in self.rows(batch.slice(n, 1))]
        self._decoded += size
        if self._decoded > self._allowed:
            self._refuse(f"its rows have more than {self._allowed:,} bytes")
        return [batch if size <= BATCH_BYTES or not self.dictionary_columns else None]

    def _refuse(self, problem: str) -> None:
        """Raise UserError for a file that may be a decompression bomb."""
        raise UserError(
            f"Dataset {self._path}: {problem}, far more than its size on disk allows; it may be "
            "a decompression bomb.",
            _ADVICE,
        )


def decoded_bytes(array: Any) -> int:
    """Compute the bytes of an Arrow array after decoding its dictionaries."""
    from pyarrow import compute, types

    if types.is_dictionary(array.type):
        if not len(array) or not (
            types.is_string(array.type.value_type) or types.is_binary(array.type.value_type)
        ):
            return int(array.nbytes)
        lengths = compute.binary_length(array.dictionary)
        return int(compute.sum(compute.take(lengths, array.indices)).as_py() or 0)
    if types.is_struct(array.type):
        return sum(map(decoded_bytes, array.flatten()))
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_map(array.type):
        return decoded_bytes(array.flatten()) + _ROW_BYTES * len(array)
    return int(array.nbytes)


def _dictionary_bytes(path: Path, column: Any) -> int:
    """Read the uncompressed size of a column's dictionary from its page header; 0 without a dictionary."""
    if not column.has_dictionary_page:
        return 0
    with path.open("rb") as file:
        file.seek(column.dictionary_page_offset or 0)
        header = file.read(12)
    # Thrift's compact protocol: fields 1 (type) and 2 (uncompressed size), both i32, as zigzag varints
    if len(header) < 4 or header[0] != 0x15 or header[2] != 0x15:
        return int(column.total_uncompressed_size)
    size = shift = 0
    for byte in header[3:]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return min(size >> 1, int(column.total_uncompressed_size))
    return int(column.total_uncompressed_size)
