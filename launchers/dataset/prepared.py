"""Prepared data: tokenised once, read by every engine in the same order.

A folder with::

    info.json         PreparedInfo
    tokens.npy        int32, all rows' tokens one after the other
    labels.npy        int32, same length; IGNORE where a token does not count in the loss, among them
                      the first of each document (nothing predicts it), so that "labels that count"
                      is the same number before and after the shift by one
    offsets.npy       int64 [rows + 1], where each row begins in tokens.npy
    lengths.npy       int32, the lengths of the documents in all rows, one after the other
    length_offsets.npy int64 [rows + 1], where each row's lengths begin (one a row unless packed; two of a
                      pair, the chosen conversation and the rejected one)
    desirable.npy     bool [rows], whether the answer is a good one; of judged answers alone
    asking.json       how the model is asked (launchers.dataset.asking.Asking); not of held-out rows
    prompts.jsonl     each row's prompt as launchers.dataset.prompts.Prompt; of task grpo alone, whose rows
                      are prompts, of which nothing counts
    order.npy         int32 [total_steps * global_batch_size], the rows in training order, epochs included;
                      unless packed (or switched off), step 0 has the longest rows, in falling length

Step s of a run trains on ``order[s * batch : (s + 1) * batch]`` (batch: info.global_batch_size) whatever the
number of processes, so a run may go on at another world size without missing or repeating a row.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a tenth of a second to import; the flow's processes need the names only
    import numpy as np
    from numpy.typing import NDArray

IGNORE = -100
PROMPTS = "prompts.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedInfo:
    rows: int
    tokens: int
    label_tokens: int  # tokens that count in the loss
    truncated_rows: int
    longest_row: int
    seq_len: int
    packed: bool
    pad_id: int
    vocab_size: int
    global_batch_size: int  # rows of a step
    total_steps: int
    seed: int
    fingerprint: str  # of tokenizer, data and settings: equal means the same training order and tokens
    documents: int = (
        0  # conversations, texts or their pieces, or pairs in all rows; equals rows unless packed
    )
    task: str = "sft"
    dropped_rows: int = 0  # left out: nothing that counts in the loss was within seq_len
    split_rows: int = 0  # longer than seq_len and split (task pretrain), not cut
    pieces: int = 0  # that these became; each is one of `documents`
    shortest: int = 0  # lengths of the documents in tokens, before they were cut or split
    median: int = 0
    p95: int = 0
    longest: int = 0
    content: str = ""  # of images: fingerprint of the rows alone, which decide latents and texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence: 1-d arrays of equal length, and the lengths of the documents packed into it."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: NDArray[np.int32]
    desirable: bool = True  # of a judged answer: whether it is a good one

    @property
    def positions(self) -> NDArray[np.int32]:
        """Positions that begin at 0 in each document."""
        import numpy as np

        return np.concatenate([np.arange(n, dtype=np.int32) for n in self.lengths])

    def documents(self) -> list[Row]:
        """Each document as a row of its own."""
        rows: list[Row] = []
        first = 0
        for length in self.lengths:
            part = slice(first, first + int(length))
            lengths = self.lengths[len(rows) : len(rows) + 1]
            rows.append(Row(tokens=self.tokens[part], labels=self.labels[part], lengths=lengths))
            first += int(length)
        return rows


class Prepared:
    """Reads a prepared folder; arrays are memory-mapped, so many ranks share one copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = PreparedInfo(**json.loads((folder / "info.json").read_text()))

    def _array(self, name: str) -> NDArray[np.int32]:
        import numpy as np

        array: NDArray[np.int32] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return array

    @cached_property
    def _tokens(self) -> NDArray[np.int32]:
        return self._array("tokens")

    @cached_property
    def _labels(self) -> NDArray[np.int32]:
        return self._array("labels")

    @cached_property
    def _lengths(self) -> NDArray[np.int32]:
        return self._array("lengths")

    @cached_property
    def _offsets(self) -> NDArray[np.int32]:
        return self._array("offsets")

    @cached_property
    def _length_offsets(self) -> NDArray[np.int32]:
        return self._array("length_offsets")

    @cached_property
    def _desirable(self) -> NDArray[np.int32] | None:
        return self._array("desirable") if (self.folder / "desirable.npy").is_file() else None

    @cached_property
    def order(self) -> NDArray[np.int32]:
        return self._array("order")

    def __len__(self) -> int:
        return self.info.rows

    @property
    def row_lengths(self) -> NDArray[np.int32]:
        """Tokens in each row."""
        import numpy as np

        return np.diff(self._offsets)

    def row(self, index: int) -> Row:
        first, last = self._offsets[index], self._offsets[index + 1]
        low, high = self._length_offsets[index], self._length_offsets[index + 1]
        return Row(
            tokens=self._tokens[first:last],
            labels=self._labels[first:last],
            lengths=self._lengths[low:high],
            desirable=self._desirable is None or bool(self._desirable[index]),
        )


class Writer:
    """Writes a prepared folder row by row; info.json comes last, so a folder without it is not complete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("info.json", "desirable.npy"):  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        self._folder = folder
        self._tokens, self._labels, self._lengths = (
            _GrowingArray(folder / f"{name}.npy") for name in ("tokens", "labels", "lengths")
        )
        self._sizes, self._counts, self._desirable = array("i"), array("i"), bytearray()
        self.label_tokens = 0  # tokens that count in the loss

    def add(self, row: Row) -> None:
        """Append a row."""
        self._tokens.append(row.tokens)
        self._labels.append(row.labels)
        self._lengths.append(row.lengths)
        self._sizes.append(len(row.tokens))
        self._counts.append(len(row.lengths))
        self._desirable.append(row.desirable)
        self.label_tokens += int((row.labels != IGNORE).sum())

    def finish(self, order: NDArray[np.int32], info: PreparedInfo) -> None:
        """Write what is known only with the last row."""
        import numpy as np

        def offsets(sizes: array[int]) -> NDArray[np.int64]:
            return np.concatenate([[0], np.cumsum(np.frombuffer(sizes, dtype=np.int32), dtype=np.int64)])

        for growing in (self._tokens, self._labels, self._lengths):
            growing.close()
        np.save(self._folder / "offsets.npy", offsets(self._sizes))
        np.save(self._folder / "length_offsets.npy", offsets(self._counts))
        np.save(self._folder / "order.npy", order.astype(np.int32))
        if not all(self._desirable):
            np.save(self._folder / "desirable.npy", np.frombuffer(self._desirable, dtype=np.bool_))
        (self._folder / "info.json").write_text(json.dumps(dataclasses.asdict(info), indent=1))


class _GrowingArray:
    """A .npy file of int32 whose length is known at its end only.

    numpy leaves room in the header for an array that grows along its first axis.
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
    """Write a prepared folder of rows that are at hand."""
    writer = Writer(folder)
    for row in rows:
        writer.add(row)
    writer.finish(order, info)
