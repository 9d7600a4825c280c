"""Limits and batching for the evaluation of held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from launchers.dataset.prepared import Row

MAX_ROWS = 256  # maximum number of evaluated rows
# Tokens per batch, padding included; with a vocabulary of 128k, 2 GiB of bf16 logits
MAX_BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}


class Rows(Protocol):
    """Rows by index, such as prepared data."""

    def row(self, index: int, /) -> Row:
        """Return the row at ``index``."""
        ...


def batches_by_length(
    data: Rows, rows: Iterable[int], max_tokens: int, max_rows: int | None = None
) -> Iterator[list[int]]:
    """Iterate over batches of rows of similar length, as lists of row indices; the longest first.

    ``max_tokens``: of a batch, including padding; a longer row is a batch alone.
    """
    # A pair is two sequences, padded to the longer one
    lengths = {index: len(sizes) * int(sizes.max()) for index in rows for sizes in [data.row(index).lengths]}
    batch: list[int] = []
    for index in sorted(lengths, key=lambda index: -lengths[index]):
        if batch and (lengths[batch[0]] * (len(batch) + 1) > max_tokens or len(batch) == max_rows):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
