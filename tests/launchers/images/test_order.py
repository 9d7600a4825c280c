from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.images.order import count_batches, in_batches

rows = st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=40).map(np.array)


@given(buckets=rows, epochs=st.integers(1, 4), batch=st.integers(1, 9), seed=st.integers(0, 3))
def test_each_batch_has_one_bucket_and_no_row_repeats_before_all_of_its_bucket_are_used(
    buckets: np.ndarray, epochs: int, batch: int, seed: int
) -> None:
    order = in_batches(buckets, epochs, batch, seed=seed)
    assert len(order) == count_batches(buckets, epochs, batch) * batch
    for step in order.reshape(-1, batch):
        assert len(set(buckets[step])) == 1
    rows_by_bucket: Counter[int] = Counter()
    for row in order.tolist():
        rows_by_bucket[row] += 1
        mates = np.flatnonzero(buckets == buckets[row]).tolist()
        # `seen` of a row's batch counts in the order in which its bucket comes
        assert rows_by_bucket[row] - min(rows_by_bucket[mate] for mate in mates) <= 1
    for bucket, count in Counter(buckets.tolist()).items():
        total = sum(rows_by_bucket[row] for row in np.flatnonzero(buckets == bucket).tolist())
        assert total == epochs * count // batch * batch  # what is left of an epoch is not lost


def test_a_seed_gives_one_order_and_more_epochs_extend_it() -> None:
    buckets = np.arange(50) % 3
    order = in_batches(buckets, 2, 4, seed=0)
    assert order.dtype == np.int32
    assert np.array_equal(order, in_batches(buckets, 2, 4, seed=0))
    assert not np.array_equal(order, in_batches(buckets, 2, 4, seed=1))
    assert np.array_equal(order, in_batches(buckets, 5, 4, seed=0)[: len(order)])
    assert np.array_equal(order[: 7 * 4], in_batches(buckets, 1000, 4, seed=0, max_batches=7))


def test_buckets_are_mixed_within_an_epoch() -> None:
    buckets = np.repeat([0, 1], 40)
    steps = buckets[in_batches(buckets, 1, 4, seed=0)].reshape(-1, 4)[:, 0]
    assert Counter(steps.tolist()) == {0: 10, 1: 10}
    assert np.abs(np.diff(steps)).sum() > 4  # not one bucket after the other


@pytest.mark.parametrize("batch", [3, 8])
def test_too_few_images_make_no_batch(batch: int) -> None:
    assert len(in_batches(np.array([0, 0, 1, 1]), 1, batch, seed=0)) == 0
