"""The schedule of pairs: every pair occurs, and no node is in two pairs at once."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checklist.round_robin import ROUNDS_ABOVE, rounds, schedule


@given(st.integers(2, 70))
def test_every_pair_comes_exactly_once(nodes: int) -> None:
    pairs = [pair for rounds_of_nodes in rounds(nodes) for pair in rounds_of_nodes]
    assert sorted(pairs) == list(combinations(range(nodes), 2))
    assert len(rounds(nodes)) == (nodes - 1 if nodes % 2 == 0 else nodes)


@given(st.integers(2, 70))
def test_a_round_has_no_node_twice_and_at_most_one_idle_node(nodes: int) -> None:
    for pairs in rounds(nodes):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == nodes - nodes % 2


@settings(deadline=None, max_examples=25)  # a deadline would fail on a busy machine
@given(st.integers(33, 300), st.integers(0, 5))
def test_above_32_nodes_each_node_gets_enough_partners_and_none_twice(nodes: int, seed: int) -> None:
    plan = schedule(nodes, seed=seed)
    assert len(plan) == ROUNDS_ABOVE
    pairs = [pair for pairs_of_round in plan for pair in pairs_of_round]
    assert len(pairs) == len(set(pairs))
    met = [sum(node in pair for pair in pairs) for node in range(nodes)]
    assert min(met) >= ROUNDS_ABOVE - 1  # an odd number of nodes: one round of rest
    for pairs_of_round in plan:
        busy = [node for pair in pairs_of_round for node in pair]
        assert len(busy) == len(set(busy))


def test_up_to_32_nodes_all_pairs_are_measured() -> None:
    assert sum(map(len, schedule(32))) == 32 * 31 // 2
    assert len(schedule(8, count=2)) == 2


@pytest.mark.parametrize("nodes", [33, 64, 100])
def test_successive_nights_measure_different_pairs_until_all_are_measured(nodes: int) -> None:
    every = len(rounds(nodes))
    nights = -(-every // ROUNDS_ABOVE)
    first = {pair for one in schedule(nodes) for pair in one}
    second = {pair for one in schedule(nodes, night=1) for pair in one}
    if every >= 2 * ROUNDS_ABOVE:
        assert not first & second
    measured_pairs_of_nights = {
        pair
        for night in range(20_000, 20_000 + nights)
        for one in schedule(nodes, night=night)
        for pair in one
    }
    assert len(measured_pairs_of_nights) == nodes * (nodes - 1) // 2
    assert schedule(8, night=3) == schedule(8)
