"""The held-out rows that a model is measured on, and how many go through it at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from launchers.dataset.prepared import Row

MAX_ROWS = 256  # that are measured
# Tokens, padding included, that go through a model at once: at a vocabulary of 128k, 2 GiB of bf16 logits.
MAX_BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}


class Rows(Protocol):
    """Rows by number, as prepared data has them."""

    def row(self, index: int, /) -> Row: ...


def batches_by_length(
    data: Rows, rows: Iterable[int], max_tokens: int, max_rows: int | None = None
) -> Iterator[list[int]]:
    """Rows of similar length together, at least one at a time; the longest first."""
    lengths = {index: _padded_tokens(data.row(index)) for index in rows}
    batch: list[int] = []
    for index in sorted(lengths, key=lambda index: -lengths[index]):
        if batch and (lengths[batch[0]] * (len(batch) + 1) > max_tokens or len(batch) == max_rows):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded_tokens(row: Row) -> int:
    """Tokens of a row in a batch with shorter ones; a pair is two sequences."""
    return len(row.lengths) * int(row.lengths.max())
