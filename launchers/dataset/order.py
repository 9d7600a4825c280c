"""Order of a run's rows by length, and the padding that an order needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from launchers.dataset.seeding import random_stream

# Rows are sorted within this number of batches, or within a quarter of an epoch, as in transformers 5.4
# (trainer_pt_utils.py, get_length_grouped_indices)
GROUPED_BATCHES = 50


def longest_first(order: NDArray[np.int32], lengths: NDArray[np.int64], batch: int) -> NDArray[np.int32]:
    """Move the ``batch`` longest rows to the front, longest first, each by swapping it with another row.

    Rank r then starts with the r-th longest row, for any number of ranks, and no later micro batch, of any
    size, is wider than the first. Rows of equal length keep their order.
    """
    result, position_of = order.copy(), np.argsort(order)
    longest = order[np.argsort(-lengths[order], kind="stable")[:batch]]
    for position, row in enumerate(longest):
        other_position, displaced = position_of[row], result[position]
        result[position], result[other_position] = row, displaced
        position_of[row], position_of[displaced] = position, other_position
    return result


def grouped_by_length(
    order: NDArray[np.int32], lengths: NDArray[np.int64], batch: int, *, seed: int, first: int = 0
) -> NDArray[np.int32]:
    """Reorder whole epochs so that each batch has rows of similar length, the longest first.

    Rows are sorted by length within windows of :data:`GROUPED_BATCHES` batches; the batches of a window are
    then shuffled, so that their lengths have no trend. The first ``first`` batches are not changed, nor are
    batches that contain the end of an epoch, so no row occurs twice in a window.
    """
    count, result = len(lengths), order.copy()
    window = max(1, min(count // (4 * batch), GROUPED_BATCHES))
    for epoch in range(len(order) // count):
        start = max(-(-epoch * count // batch), first)
        end = (epoch + 1) * count // batch
        for low in range(start, end, window):
            high = min(low + window, end)
            rows = order[low * batch : high * batch]
            batches = rows[np.argsort(-lengths[rows], kind="stable")].reshape(-1, batch)
            shuffled = random_stream(seed, "grouped batches", low).permutation(len(batches))
            result[low * batch : high * batch] = batches[shuffled].ravel()
    return result


def padding_share(
    order: NDArray[np.int32], lengths: NDArray[np.int64], *, batch: int, processes: int, micro_batch: int
) -> float:
    """Return the share of padding in all positions if micro batches are padded to their longest row."""
    steps = lengths[order[: len(order) // batch * batch]].reshape(-1, batch // processes, processes)
    # Divided among ranks and micro batches as in launchers/dataset/batches.py
    rank_rows = steps.transpose(0, 2, 1).reshape(-1, micro_batch)
    positions = int(rank_rows.max(axis=1).sum()) * micro_batch
    return 1 - int(rank_rows.sum()) / positions
