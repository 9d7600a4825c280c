"""Screening with all pairs sending at once: slow pairs are measured separately."""

from __future__ import annotations

import numpy as np
import pytest

from checklist.analysis.screening import more_rounds, rates, slow_pairs

SIZE = 4 << 20


def measured_seconds(rate: np.ndarray) -> np.ndarray:
    """Return the seconds that each node measures per ring distance, from rates in GB/s."""
    count = len(rate)
    seconds = SIZE / 1e9 / rate
    best = np.empty((count, count - 1))
    for node in range(count):
        for distance in range(1, count):
            to, back = (node + distance) % count, (node - distance) % count
            best[node, distance - 1] = max(seconds[node, to], seconds[back, node])
    return best


def healthy(count: int, noise: float = 0.05) -> np.ndarray:
    random = np.random.default_rng(3)
    return 10.0 * (1 - np.abs(random.normal(0, noise, (count, count))))


def test_a_link_at_three_quarters_is_suspect_and_few_healthy_pairs_are() -> None:
    rate = healthy(64)
    rate[7, 20] *= 0.75
    slow = slow_pairs(rates(measured_seconds(rate), SIZE))
    assert slow[0] == (7, 20)
    assert len(slow) < 0.02 * 64 * 63 / 2


def test_a_slow_node_does_not_make_all_its_pairs_suspect() -> None:
    rate = healthy(64, 0.01)
    rate[5, :] *= 0.5
    rate[:, 5] *= 0.5
    assert slow_pairs(rates(measured_seconds(rate), SIZE)) == []


def test_unmeasured_nodes_are_not_suspects() -> None:
    best = measured_seconds(healthy(40, 0.0))
    best[3] = np.nan
    assert (slow_pairs(rates(best, SIZE)), slow_pairs(rates(np.full((40, 39), np.nan), SIZE))) == ([], [])


@pytest.mark.parametrize("most_pairs", [1, 2, 16])
def test_no_node_is_in_two_pairs_of_a_round_and_the_slowest_come_first(most_pairs: int) -> None:
    pairs = [(0, 1), (0, 2), (3, 4), (1, 2), (0, 3)]
    rounds = more_rounds(pairs, most_pairs)
    assert len(rounds) <= most_pairs
    for one in rounds:
        nodes = [node for pair in one for node in pair]
        assert len(nodes) == len(set(nodes))
    assert rounds[0][0] == (0, 1)
    if most_pairs == 16:
        assert sorted(pair for one in rounds for pair in one) == sorted(pairs)


def test_a_pair_takes_the_shorter_of_its_two_times_and_a_single_node_has_no_rate() -> None:
    rate = rates(np.array([[2.0], [1.0]]), 10**9)
    assert rate[0, 1] == rate[1, 0] == 1.0
    assert np.isnan(rate.diagonal()).all()
    assert rates(np.empty((1, 0)), 10**9).shape == (1, 1)
