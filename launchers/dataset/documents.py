"""Tokenized documents of a run: chunks of rows, one folder of files, and the packing into rows."""

from __future__ import annotations

import dataclasses
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launchers.dataset.prepared import IGNORE, Row


@dataclass(kw_only=True, slots=True)
class Chunk:
    """Documents of consecutive rows, concatenated, and counts of truncated, dropped and split rows.

    A row is one document, a pair two (chosen and rejected); for task pretrain, a row is split into one
    document per piece. Rows with a document without label tokens are dropped, except for task grpo, whose
    rows are prompts without labels.
    """

    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_]  # [tokens], whether a token counts in the loss
    lengths: NDArray[np.int32]  # [documents], number of tokens
    desirable: NDArray[np.bool_]  # [kept rows]
    # Lengths of the kept rows' documents before truncation or splitting; lower bounds of ``cut`` documents
    full_lengths: NDArray[np.int32]
    images: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # files, concatenated
    image_sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [images], bytes
    image_counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # [documents]
    rows: int = 0
    truncated: int = 0
    cut: int = 0  # truncated documents of which only the beginning was tokenized
    dropped: int = 0
    split: int = 0
    pieces: int = 0

    def save(self, path: Path) -> None:
        """Write a file atomically."""
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        temporary.rename(path)

    @classmethod
    def load(cls, path: Path) -> Chunk:
        """Read a saved chunk."""
        with np.load(path) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
        values: dict[str, Any] = {name: value if value.ndim else int(value) for name, value in loaded.items()}
        return cls(**values)


class Documents:
    """All documents of a run: tokens, masks and images in files, lengths in memory.

    ``per_row``: number of documents per row.
    """

    def __init__(self, folder: Path, per_row: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.per_row = folder, per_row
        self.rows = self.truncated = self.cut = self.dropped = self.split = self.pieces = 0
        self.largest = -1  # largest token id
        # One value per document (desirable: per row), appended chunk by chunk
        types = {
            "lengths": "i",
            "desirable": "b",
            "full_lengths": "i",
            "image_sizes": "q",
            "image_counts": "i",
        }
        self._columns = {name: array(kind) for name, kind in types.items()}
        self._tokens = (folder / "tokens").open("wb+", buffering=1 << 20)
        self._counted = (folder / "counted").open("wb+", buffering=1 << 20)
        self._images = (folder / "images").open("wb+", buffering=1 << 20)

    def add(self, chunk: Chunk) -> None:
        """Append the documents of a chunk."""
        self._tokens.write(chunk.tokens.data)
        self._counted.write(chunk.counted.data)
        self._images.write(chunk.images.data)
        for name, column in self._columns.items():
            column.frombytes(getattr(chunk, name).tobytes())
        for name in ("rows", "truncated", "cut", "dropped", "split", "pieces"):
            setattr(self, name, getattr(self, name) + getattr(chunk, name))
        if len(chunk.tokens):
            self.largest = max(self.largest, int(chunk.tokens.max()))

    def finish(self) -> None:
        """Finish writing; documents can be read only afterwards."""
        self.lengths = np.frombuffer(self._columns["lengths"], dtype=np.int32)
        self.desirable = np.frombuffer(self._columns["desirable"], dtype=np.bool_)
        self.full_lengths = np.frombuffer(self._columns["full_lengths"], dtype=np.int32)
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        sizes = np.frombuffer(self._columns["image_sizes"], dtype=np.int64)
        counts = np.frombuffer(self._columns["image_counts"], dtype=np.int32)
        self._image_offsets = np.concatenate([[0], np.cumsum(sizes)])
        self._first_images = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._tokens.flush()
        self._counted.flush()
        self._images.flush()

    def __len__(self) -> int:
        """Return the number of kept rows, each of ``per_row`` documents."""
        return len(self.desirable)

    def unpacked(self) -> Packing:
        """Return the packing in which every kept row is a separate sequence."""
        return Packing(members=np.arange(len(self.lengths)), starts=np.arange(len(self) + 1) * self.per_row)

    def row(self, members: NDArray[np.int64]) -> Row:
        """Concatenate the documents with these indices to one row."""
        parts = [self._read(int(member)) for member in members]
        tokens = parts[0][0] if len(parts) == 1 else np.concatenate([tokens for tokens, _ in parts])
        counted = parts[0][1] if len(parts) == 1 else np.concatenate([counted for _, counted in parts])
        return Row(
            tokens=tokens,
            labels=np.where(counted, tokens, np.int32(IGNORE)),
            lengths=self.lengths[members],
            desirable=bool(self.desirable[members // self.per_row].all()),
            images=[image for member in members for image in self._images_of(int(member))],
        )

    def _images_of(self, document: int) -> Iterator[NDArray[np.uint8]]:
        """Iterate over the encoded images of a document."""
        if len(self._image_offsets) == 1:
            return
        for image in range(self._first_images[document], self._first_images[document + 1]):
            first, last = int(self._image_offsets[image]), int(self._image_offsets[image + 1])
            self._images.seek(first)
            yield np.frombuffer(self._images.read(last - first), dtype=np.uint8)

    def _read(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Read the tokens of a document, and whether each counts in the loss."""
        first, length = int(self._offsets[document]), int(self.lengths[document])
        self._tokens.seek(4 * first)
        self._counted.seek(first)
        tokens = np.frombuffer(self._tokens.read(4 * length), dtype=np.int32)
        return tokens, np.frombuffer(self._counted.read(length), dtype=np.bool_)

    def close(self) -> None:
        """Delete the files."""
        self._tokens.close()
        self._counted.close()
        self._images.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Assignment of documents to rows: row r contains ``members[starts[r] : starts[r + 1]]``."""

    members: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of_row(self, row: int) -> NDArray[np.int64]:
        """Return the documents of a row."""
        return self.members[self.starts[row] : self.starts[row + 1]]

    def reordered(self, rows: NDArray[np.int64]) -> Packing:
        """Return the packing with its rows in another order; every row must be a single document."""
        return Packing(members=self.members[rows], starts=self.starts)
