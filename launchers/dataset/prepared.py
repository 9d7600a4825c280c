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


def write(folder: Path, rows: list[Row], order: NDArray[np.int32], info: PreparedInfo) -> None:
    """Write a prepared folder; info.json comes last, so a folder without it is not complete."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)

    def offsets(sizes: list[int]) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    arrays: dict[str, NDArray[np.generic]] = {
        "tokens": np.concatenate([row.tokens for row in rows]).astype(np.int32),
        "labels": np.concatenate([row.labels for row in rows]).astype(np.int32),
        "offsets": offsets([len(row.tokens) for row in rows]),
        "lengths": np.concatenate([row.lengths for row in rows]).astype(np.int32),
        "length_offsets": offsets([len(row.lengths) for row in rows]),
        "order": order.astype(np.int32),
    }
    if not all(row.desirable for row in rows):
        arrays["desirable"] = np.array([row.desirable for row in rows])
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "info.json").write_text(json.dumps(dataclasses.asdict(info), indent=1))
