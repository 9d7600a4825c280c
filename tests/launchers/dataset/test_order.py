"""The order of rows: longest first, then grouped by length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from launchers.dataset.order import GROUPED_BATCHES, grouped_by_length, longest_first, padding_share
from launchers.dataset.seeding import random_stream


def drawn_epochs(rows: int, epochs: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    parts = [random_stream(0, "epoch", epoch).permutation(rows) for epoch in range(epochs)]
    return np.concatenate(parts).astype(np.int32)


@given(data=st.data())
@hypothesis_settings(max_examples=40, deadline=None)
def test_no_rank_gets_a_wider_micro_batch_after_the_first_step_with_the_longest_rows(
    data: st.DataObject,
) -> None:
    world, micro, accumulation = (data.draw(st.integers(1, 4)) for _ in range(3))
    batch = world * micro * accumulation
    lengths = np.array(data.draw(st.lists(st.integers(1, 30), min_size=batch, max_size=100)))
    drawn = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(len(lengths))
    order = longest_first(drawn, lengths, batch)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    moved = set(np.flatnonzero(order != drawn).tolist())
    assert len(moved) <= 2 * batch
    for rank in range(world):
        mine = [
            lengths[row]
            for step in range(len(order) // batch)
            for row in order[step * batch : (step + 1) * batch][rank::world]
        ]
        widths = [max(mine[at : at + micro]) for at in range(0, len(mine), micro)]
        assert widths[0] == max(widths)


def test_rows_of_one_length_stay_in_their_order() -> None:
    drawn = np.random.default_rng(0).permutation(20)
    assert longest_first(drawn, np.full(20, 7), 8).tolist() == drawn.tolist()


@given(data=st.data())
@hypothesis_settings(max_examples=30, deadline=None)
def test_grouping_by_length_moves_rows_only_within_one_group_of_an_epoch(data: st.DataObject) -> None:
    batch, epochs, first = (data.draw(st.integers(low, 5)) for low in (1, 1, 0))
    lengths = np.array(data.draw(st.lists(st.integers(1, 30), min_size=batch, max_size=120)))
    count = len(lengths)
    drawn = drawn_epochs(count, epochs)
    order = grouped_by_length(drawn, lengths, batch, seed=0, first=first)
    assert order[: first * batch].tolist() == drawn[: first * batch].tolist()
    group_rows = max(1, min(count // (4 * batch), GROUPED_BATCHES)) * batch
    for epoch in range(epochs):
        place = np.argsort(order[epoch * count : (epoch + 1) * count])
        before = np.argsort(drawn[epoch * count : (epoch + 1) * count])
        assert len(set(place.tolist())) == count
        assert np.abs(place - before).max(initial=0) < group_rows
    for step in range(first, len(order) // batch):
        widths = lengths[order[step * batch : (step + 1) * batch]]
        crosses = step * batch // count != (step * batch + batch - 1) // count
        assert crosses or (np.diff(widths) <= 0).all()


def test_more_epochs_extend_the_same_order_and_lengths_have_no_trend_within_an_epoch() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 1003)
    once, twice = (
        grouped_by_length(drawn_epochs(1003, epochs), lengths, 8, seed=4).tolist() for epochs in (1, 2)
    )
    assert twice[: 1003 - 1003 % 8] == once[: 1003 - 1003 % 8]
    widths = lengths[np.array(once)][:1000].reshape(-1, 8).max(axis=1)
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2


def test_grouping_by_length_reduces_padding_for_any_number_of_processes() -> None:
    lengths = np.random.default_rng(1).lognormal(5, 0.8, 4000).astype(int) + 1
    drawn = drawn_epochs(4000, 1)
    grouped = grouped_by_length(drawn, lengths, 32, seed=0)
    for processes, micro in ((1, 8), (2, 4), (4, 8), (8, 2)):
        before, after = (
            padding_share(order, lengths, batch=32, processes=processes, micro_batch=micro)
            for order in (drawn, grouped)
        )
        assert after < before / 3, (processes, micro, before, after)


def test_padding_is_counted_over_the_micro_batches_of_all_ranks() -> None:
    lengths = np.array([4, 1, 2, 1])
    order = np.arange(4, dtype=np.int32)  # rank 0 has rows 0 and 2, rank 1 rows 1 and 3
    assert padding_share(order, lengths, batch=4, processes=2, micro_batch=2) == 1 - 8 / (2 * 4 + 2 * 1)
    assert padding_share(order, lengths, batch=4, processes=2, micro_batch=1) == 0


def test_rows_are_sorted_within_groups_of_a_quarter_epoch_or_at_most_fifty_batches() -> None:
    for rows, stretch in ((64, 16), (4 * (GROUPED_BATCHES + 10), GROUPED_BATCHES)):
        lengths = np.arange(rows)
        order = grouped_by_length(np.arange(rows, dtype=np.int32), lengths, 1, seed=0)
        places = np.arange(rows) // stretch
        assert (order // stretch == places).all()
        assert (order != np.arange(rows)).any()
