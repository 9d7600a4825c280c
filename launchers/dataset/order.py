"""The order of a run's rows, and what of it is padding: pure arithmetic on their lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from launchers.dataset.seeding import random_stream

# transformers 5.4, trainer_pt_utils.py, get_length_grouped_indices: rows are sorted within so many batches,
# or within a quarter of an epoch
GROUPED_BATCHES = 50


def longest_first(order: NDArray[np.int32], lengths: NDArray[np.int64], batch: int) -> NDArray[np.int32]:
    """``order`` with its ``batch`` longest rows in front, the longest first; each swaps with what was there.

    Rank r of any number of processes then begins with the r-th longest row, and no later micro batch of this
    order, of whatever size, is wider. Rows of one length keep their order.
    """
    result, place_of = order.copy(), np.argsort(order)
    longest = order[np.argsort(-lengths[order], kind="stable")[:batch]]
    for place, row in enumerate(longest):
        other, moved = place_of[row], result[place]
        result[place], result[other] = row, moved
        place_of[row], place_of[moved] = place, other
    return result


def grouped_by_length(
    order: NDArray[np.int32], lengths: NDArray[np.int64], batch: int, *, seed: int, first: int = 0
) -> NDArray[np.int32]:
    """``order``, of whole epochs, with rows of about one length in each batch, the longest of it first.

    Rows are sorted within stretches of :data:`GROUPED_BATCHES` batches, whose batches are then drawn, so that
    lengths don't fall along a stretch. The first ``first`` batches stay, and so do those in which an epoch
    ends and the next begins: no row comes twice in a stretch.
    """
    count, result = len(lengths), order.copy()
    most = max(1, min(count // (4 * batch), GROUPED_BATCHES))
    for epoch in range(len(order) // count):
        begin = max(-(-epoch * count // batch), first)
        end = (epoch + 1) * count // batch
        for low in range(begin, end, most):
            high = min(low + most, end)
            rows = order[low * batch : high * batch]
            batches = rows[np.argsort(-lengths[rows], kind="stable")].reshape(-1, batch)
            drawn = random_stream(seed, "grouped batches", low).permutation(len(batches))
            result[low * batch : high * batch] = batches[drawn].ravel()
    return result


def padding_share(
    order: NDArray[np.int32], lengths: NDArray[np.int64], *, batch: int, processes: int, micro_batch: int
) -> float:
    """The share of all positions that is padding, where each micro batch is as wide as its longest row."""
    steps = lengths[order[: len(order) // batch * batch]].reshape(-1, batch // processes, processes)
    by_rank = steps.transpose(0, 2, 1).reshape(
        -1, micro_batch
    )  # as launchers/dataset/batches.py divides them
    positions = int(by_rank.max(axis=1).sum()) * micro_batch
    return 1 - int(by_rank.sum()) / positions
