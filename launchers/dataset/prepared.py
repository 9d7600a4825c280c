"""Prepared data: tokenized rows on disk, which every engine reads in the same order.

Contents of the folder::

    info.json         PreparedInfo
    tokens.npy        int32, tokens of all rows, concatenated
    labels.npy        int32, same length; IGNORE where a token does not count in the loss. This includes the
                      first token of each document, which nothing predicts, so the number of labels is the
                      same before and after the shift by one
    offsets.npy       int64 [rows + 1], start of each row in tokens.npy
    lengths.npy       int32, lengths of the documents of all rows, concatenated
    length_offsets.npy int64 [rows + 1], start of each row's lengths (one per row unless packed; two per
                      pair, the chosen and the rejected conversation)
    desirable.npy     bool [rows], whether the answer is a good one; judged answers only
    images.bin        encoded images of all rows, concatenated; rows with images only
    image_offsets.npy int64 [images + 1], start of each image in images.bin
    row_images.npy    int64 [rows + 1], index of each row's first image
    asking.json       prompt format (launchers.dataset.asking.PromptFormat); not for held-out rows
    prompts.jsonl     each row's prompt as launchers.dataset.prompts.Prompt; task grpo only, whose rows are
                      prompts without labels
    order.npy         int32 [total_steps * global_batch_size], rows in training order, all epochs included;
                      unless packed (or disabled), step 0 has the longest rows, in descending length

Step s of a run trains on ``order[s * batch : (s + 1) * batch]`` (batch: info.global_batch_size) for any
number of processes, so a run can resume at another world size without missing or repeating a row.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # takes a tenth of a second to import; the flow's processes need only the names
    import numpy as np
    from numpy.typing import NDArray

IGNORE = -100
PROMPTS = "prompts.jsonl"
_IMAGES = "images.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedInfo:
    """Statistics and parameters of prepared data (info.json)."""

    rows: int
    tokens: int
    label_tokens: int  # tokens that count in the loss
    truncated_rows: int
    longest_row: int
    seq_len: int
    packed: bool
    pad_id: int
    vocab_size: int
    global_batch_size: int  # rows per step
    total_steps: int
    seed: int
    fingerprint: str  # hash of tokenizer, data and settings; equal for the same tokens in the same order
    documents: int = 0  # number of conversations, texts or pieces of texts, or pairs; rows unless packed
    task: str = "sft"
    dropped_rows: int = 0  # rows without labels within seq_len
    split_rows: int = 0  # rows longer than seq_len that were split (task pretrain), not truncated
    pieces: int = 0  # pieces of the split rows; each is one of `documents`
    shortest: int = 0  # lengths of the documents in tokens, before truncation or splitting
    median: int = 0
    p95: int = 0
    longest: int = 0
    cut_documents: int = 0  # very long documents of which only the beginning was tokenized
    content: str = ""  # image data: hash of the rows alone, the input of latents and text embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence: tokens and labels of equal length, and the lengths of the documents in it."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: NDArray[np.int32]
    desirable: bool = True  # for judged answers: whether the answer is a good one
    images: Sequence[NDArray[np.uint8]] = ()  # encoded images, in the order of their tokens

    @property
    def positions(self) -> NDArray[np.int32]:
        """Position of each token in its document, from 0."""
        import numpy as np

        return np.concatenate([np.arange(n, dtype=np.int32) for n in self.lengths])

    def documents(self) -> list[Row]:
        """Return each document as a separate row."""
        rows: list[Row] = []
        first = 0
        for length in self.lengths:
            part = slice(first, first + int(length))
            lengths = self.lengths[len(rows) : len(rows) + 1]
            rows.append(Row(tokens=self.tokens[part], labels=self.labels[part], lengths=lengths))
            first += int(length)
        return rows


class Prepared:
    """Reader of a prepared folder; arrays are memory-mapped, so ranks share one copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, NDArray[np.int32]] = {}
        self.info = PreparedInfo(**json.loads((folder / "info.json").read_text()))

    def _array(self, name: str) -> NDArray[np.int32]:
        """Return a memory-mapped array by name; each file is opened once."""
        import numpy as np

        if name not in self._arrays:
            self._arrays[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return self._arrays[name]

    @cached_property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        return (self.folder / _IMAGES).is_file()

    @cached_property
    def _is_judged(self) -> bool:
        return (self.folder / "desirable.npy").is_file()

    @cached_property
    def _encoded(self) -> NDArray[np.uint8]:
        import numpy as np

        return np.memmap(self.folder / _IMAGES, dtype=np.uint8, mode="r")

    def _images_of(self, index: int) -> Sequence[NDArray[np.uint8]]:
        """Return the encoded images of a row."""
        if not self.has_images:
            return ()
        first, last = self._array("row_images")[index : index + 2]
        offsets = self._array("image_offsets")[first : last + 1]
        return [self._encoded[first:last] for first, last in itertools.pairwise(offsets)]

    @property
    def order(self) -> NDArray[np.int32]:
        """Row indices in training order, over all epochs."""
        return self._array("order")

    def __len__(self) -> int:
        return self.info.rows

    @property
    def row_lengths(self) -> NDArray[np.int32]:
        """Number of tokens in each row."""
        import numpy as np

        return np.diff(self._array("offsets"))

    def row(self, index: int) -> Row:
        """Return one row."""
        first, last = self._array("offsets")[index : index + 2]
        low, high = self._array("length_offsets")[index : index + 2]
        return Row(
            tokens=self._array("tokens")[first:last],
            labels=self._array("labels")[first:last],
            lengths=self._array("lengths")[low:high],
            desirable=not self._is_judged or bool(self._array("desirable")[index]),
            images=self._images_of(index),
        )


class Writer:
    """Writer of prepared data, row by row. info.json is written last; without it the folder is incomplete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("info.json", "desirable.npy", _IMAGES):  # left by an earlier run
            (folder / name).unlink(missing_ok=True)
        self._folder = folder
        self._tokens, self._labels, self._lengths = (
            _GrowingArray(folder / f"{name}.npy") for name in ("tokens", "labels", "lengths")
        )
        self._sizes, self._counts, self._desirable = array("i"), array("i"), bytearray()
        self._image_sizes, self._image_counts = array("q"), array("i")
        self.label_tokens = 0  # tokens that count in the loss

    def add(self, row: Row) -> None:
        """Append a row."""
        self._tokens.append(row.tokens)
        self._labels.append(row.labels)
        self._lengths.append(row.lengths)
        self._sizes.append(len(row.tokens))
        self._counts.append(len(row.lengths))
        self._desirable.append(row.desirable)
        self._image_counts.append(len(row.images))
        if row.images:
            with (self._folder / _IMAGES).open("ab") as file:
                for image in row.images:
                    file.write(image.data)
                    self._image_sizes.append(len(image))
        self.label_tokens += int((row.labels != IGNORE).sum())

    def finish(self, order: NDArray[np.int32], info: PreparedInfo) -> None:
        """Write the remaining files, which need all rows."""
        import numpy as np

        def offsets(sizes: array[int]) -> NDArray[np.int64]:
            return np.concatenate([[0], np.cumsum(np.array(sizes), dtype=np.int64)])

        for growing in (self._tokens, self._labels, self._lengths):
            growing.close()
        np.save(self._folder / "offsets.npy", offsets(self._sizes))
        np.save(self._folder / "length_offsets.npy", offsets(self._counts))
        np.save(self._folder / "order.npy", order.astype(np.int32))
        if self._image_sizes:
            np.save(self._folder / "image_offsets.npy", offsets(self._image_sizes))
            np.save(self._folder / "row_images.npy", offsets(self._image_counts))
        if not all(self._desirable):
            np.save(self._folder / "desirable.npy", np.frombuffer(self._desirable, dtype=np.bool_))
        (self._folder / "info.json").write_text(json.dumps(dataclasses.asdict(info), indent=1))


class _GrowingArray:
    """.npy file of int32 that is appended to; its length is known only at the end.

    The header is then rewritten in place: numpy pads headers, so that a first axis may grow.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._length = 0
        self._write_header()

    def append(self, values: NDArray[np.int32]) -> None:
        import numpy as np

        self._file.write(np.ascontiguousarray(values, dtype=np.int32).data)
        self._length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        from numpy.lib import format as npy

        header = {"descr": "<i4", "fortran_order": False, "shape": (self._length,)}
        npy.write_array_header_1_0(self._file, header)


def write(folder: Path, rows: Iterable[Row], order: NDArray[np.int32], info: PreparedInfo) -> None:
    """Write rows that are in memory as prepared data."""
    writer = Writer(folder)
    for row in rows:
        writer.add(row)
    writer.finish(order, info)
