"""Progress of a worker in a small shared file, readable even if the worker hangs, is stopped or is dead."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_SEQUENCE = struct.Struct("<Q")
_NAME_BYTES = 56
_BYTES = _SEQUENCE.size + _NAME_BYTES


class OperationCount(NamedTuple):
    """Name of an operation, and the number of operations started in the phase including this one."""

    operation: str
    sequence: int


class Progress:
    """Progress record that the worker writes and its node agent reads. A write takes under a microsecond."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._sequence = 0

    def name(self, operation: str) -> None:
        """Set the name of the worker's next operation, truncated to 56 bytes."""
        text = operation.encode()[:_NAME_BYTES]
        self._map[_SEQUENCE.size : _SEQUENCE.size + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")

    def begin(self) -> None:
        """Count one more started operation."""
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, 0, self._sequence)

    def restart(self) -> None:
        """Count from 0 again, for a new phase."""
        self._sequence = 0
        _SEQUENCE.pack_into(self._map, 0, 0)

    def read(self) -> OperationCount:
        """Read the worker's current or last operation and its number."""
        name = self._map[_SEQUENCE.size : _BYTES].rstrip(b"\0").decode(errors="replace")
        return OperationCount(name, _SEQUENCE.unpack_from(self._map, 0)[0])
