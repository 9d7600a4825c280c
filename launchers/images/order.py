"""Order of a run's images, with one bucket per step; arithmetic on bucket numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from launchers.dataset.seeding import random_stream


def count_batches(buckets: NDArray[np.integer], epochs: int, batch: int) -> int:
    """Count the steps of ``epochs``. ``buckets``: [rows], each row's bucket number."""
    counts = np.unique(buckets, return_counts=True)[1]
    return int((counts * epochs // batch).sum())


def in_batches(
    buckets: NDArray[np.integer], epochs: int, batch: int, *, seed: int, max_batches: int | None = None
) -> NDArray[np.int32]:
    """Return the rows of the whole run in order: batches of one bucket each, at most ``max_batches`` batches.

    In each epoch the rows of every bucket are shuffled; rows left over after the last full batch start the
    bucket's first batch in the next epoch, so no row is repeated before all rows of its bucket were used. The
    order of buckets within an epoch is random. More epochs extend the same order.
    """
    remainders: dict[int, NDArray[np.int32]] = {
        int(bucket): np.empty(0, np.int32) for bucket in np.unique(buckets)
    }
    order: list[NDArray[np.int32]] = []
    for epoch in range(epochs):
        if max_batches is not None and len(order) >= max_batches:
            break
        permutation = random_stream(seed, "epoch", epoch).permutation(len(buckets)).astype(np.int32)
        batches: dict[int, list[NDArray[np.int32]]] = {}
        for bucket, previous in remainders.items():
            rows = np.concatenate([previous, permutation[buckets[permutation] == bucket]])
            full = len(rows) // batch * batch
            batches[bucket] = np.split(rows[:full], full // batch) if full else []
            remainders[bucket] = rows[full:]
        order += _shuffle_batches(batches, seed, epoch)
    return np.concatenate([np.empty(0, np.int32), *order[:max_batches]])


def _shuffle_batches(
    batches: dict[int, list[NDArray[np.int32]]], seed: int, epoch: int
) -> list[NDArray[np.int32]]:
    """Shuffle the batches of all buckets, keeping the order within each bucket."""
    bucket_of_batch = [bucket for bucket, bucket_batches in batches.items() for _ in bucket_batches]
    shuffled = random_stream(seed, "batches of buckets", epoch).permutation(bucket_of_batch).tolist()
    remaining = {bucket: iter(bucket_batches) for bucket, bucket_batches in batches.items()}
    return [next(remaining[bucket]) for bucket in shuffled]
