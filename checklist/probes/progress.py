"""What a worker is doing, in a small shared file: readable when the worker hangs, is stopped, or is dead."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_SEQUENCE = struct.Struct("<Q")
_NAME_BYTES = 56
_BYTES = _SEQUENCE.size + _NAME_BYTES


class At(NamedTuple):
    """An operation's name, and how many operations of the phase were begun, this one included."""

    operation: str
    sequence: int


class Progress:
    """The worker writes, its supervisor reads. Writing costs well under a microsecond."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._sequence = 0

    def name(self, operation: str) -> None:
        """Name the operation that the worker goes on to, cut to 56 bytes."""
        text = operation.encode()[:_NAME_BYTES]
        self._map[_SEQUENCE.size : _SEQUENCE.size + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")

    def begin(self) -> None:
        """Count one more operation as begun."""
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, 0, self._sequence)

    def restart(self) -> None:
        """Count from 0 again, for a new phase."""
        self._sequence = 0
        _SEQUENCE.pack_into(self._map, 0, 0)

    def read(self) -> At:
        """The operation that the worker is at, or was at last, and its number."""
        name = self._map[_SEQUENCE.size : _BYTES].rstrip(b"\0").decode(errors="replace")
        return At(name, _SEQUENCE.unpack_from(self._map, 0)[0])
