"""A slow rail is distinguished from a slow node, link or path."""

from __future__ import annotations

import numpy as np
import pytest

from checklist.analysis.rails import SlowRail, slow_between, slow_rails
from checklist.measurements import Pair

FULL = (50.0,) * 8


def pair(src: int, dst: int, slow: dict[int, float] | None = None, scale: float = 1.0) -> Pair:
    rails = tuple(50.0 * scale * (slow or {}).get(rail, 1.0) for rail in range(8))
    return Pair(src=src, dst=dst, round=0, gbytes_per_s=8 * min(rails), rails=rails)


def every(
    nodes: int, slow: dict[tuple[int, int], float], *, sends: bool = True, receives: bool = True
) -> list[Pair]:
    """Return all pairs; some rails of nodes are slow: (node, rail) to share."""
    slow_rails_made = []
    for src in range(nodes):
        for dst in range(nodes):
            ends = [src] * sends + [dst] * receives
            own_rails = {rail: share for (node, rail), share in slow.items() if node in ends}
            slow_rails_made += [pair(src, dst, own_rails)] if src != dst else []
    return slow_rails_made


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_slow_rail_of_a_node_is_named_with_the_direction(nodes: int) -> None:
    slow = {(2, 5): 0.5}
    assert slow_rails(every(nodes, slow)) == [SlowRail(rail=5, nodes=(2,), kind="node", share=0.5)]
    (sends,) = slow_rails(every(nodes, slow, receives=False))
    assert (sends.nodes, sends.kind) == ((2,), "transmit")
    (receives,) = slow_rails(every(nodes, slow, sends=False))
    assert (receives.nodes, receives.kind) == ((2,), "receive")


def test_a_rail_that_is_slow_on_all_nodes_gives_one_finding() -> None:
    slow = {(node, 3): 0.6 for node in range(6)}
    assert slow_rails(every(6, slow)) == [
        SlowRail(rail=3, nodes=tuple(range(6)), kind="node", share=pytest.approx(0.6))
    ]


def test_both_nodes_are_named_if_a_rail_between_two_nodes_is_slow() -> None:
    (rail,) = slow_rails(every(2, {(1, 0): 0.5}))
    assert (rail.nodes, rail.rail) == ((0, 1), 0)


def test_slow_rails_of_several_nodes_are_distinguished() -> None:
    rails = slow_rails(every(6, {(0, 1): 0.5, (4, 1): 0.7, (4, 6): 0.3}))
    assert {(one.nodes, one.rail) for one in rails} == {((0,), 1), ((4,), 1), ((4,), 6)}


def test_a_node_with_all_rails_slow_or_without_rails_has_no_slow_rail() -> None:
    slow = {(1, rail): 0.25 for rail in range(8)}
    assert slow_rails(every(4, slow)) == []
    assert slow_rails([Pair(src=0, dst=1, round=0, gbytes_per_s=1.0)]) == []


def test_a_rail_slow_to_a_single_partner_is_attributed_to_the_link() -> None:
    pairs = [one for one in every(4, {}) if (one.src, one.dst) != (0, 1)] + [pair(0, 1, {2: 0.5})]
    assert slow_rails(pairs) == []
    assert slow_between(pairs, 0, 1) == (2,)
    assert slow_between(pairs, 1, 0) == ()


def test_noise_and_repeated_healthy_measurements_name_no_node() -> None:
    noise = np.random.default_rng(3)
    for _ in range(50):
        pairs = [
            Pair(
                src=a, dst=b, round=0, gbytes_per_s=1.0, rails=tuple(50 * (1 - abs(noise.normal(0, 0.03, 8))))
            )
            for a in range(8)
            for b in range(8)
            if a != b
        ]
        assert slow_rails(pairs) == []
    assert slow_rails([*every(4, {(2, 5): 0.5}), pair(2, 0), pair(0, 2)]) == []
