"""The order of a run's images, each step's of one bucket: pure arithmetic on the buckets they are in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from launchers.dataset.seeding import random_stream


def count_batches(buckets: NDArray[np.integer], epochs: int, batch: int) -> int:
    """Steps of so many epochs. ``buckets``: [rows], the number of the bucket that each is in."""
    counts = np.unique(buckets, return_counts=True)[1]
    return int((counts * epochs // batch).sum())


def in_batches(
    buckets: NDArray[np.integer], epochs: int, batch: int, *, seed: int, most: int | None = None
) -> NDArray[np.int32]:
    """Rows in the order of the whole run: batch after batch, each of one bucket; ``most`` batches at most.

    An epoch draws the rows of each bucket; what is left of one behind its last whole batch begins its first
    batch of the next epoch, so that no row comes again before all of its bucket have come. Which bucket comes
    when in an epoch is drawn. More epochs are the same order for longer.
    """
    left: dict[int, NDArray[np.int32]] = {int(bucket): np.empty(0, np.int32) for bucket in np.unique(buckets)}
    order: list[NDArray[np.int32]] = []
    for epoch in range(epochs):
        if most is not None and len(order) >= most:
            break
        drawn = random_stream(seed, "epoch", epoch).permutation(len(buckets)).astype(np.int32)
        batches: dict[int, list[NDArray[np.int32]]] = {}
        for bucket, rest in left.items():
            rows = np.concatenate([rest, drawn[buckets[drawn] == bucket]])
            whole = len(rows) // batch * batch
            batches[bucket] = np.split(rows[:whole], whole // batch) if whole else []
            left[bucket] = rows[whole:]
        order += _mixed(batches, seed, epoch)
    return np.concatenate([np.empty(0, np.int32), *order[:most]])


def _mixed(batches: dict[int, list[NDArray[np.int32]]], seed: int, epoch: int) -> list[NDArray[np.int32]]:
    """The batches of all buckets in a drawn order, in which each bucket's own keep theirs."""
    of_all = [bucket for bucket, some in batches.items() for _ in some]
    drawn = random_stream(seed, "batches of buckets", epoch).permutation(of_all).tolist()
    waiting = {bucket: iter(some) for bucket, some in batches.items()}
    return [next(waiting[bucket]) for bucket in drawn]
