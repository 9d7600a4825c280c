"""Schedule of pair measurements: rounds of disjoint pairs of nodes."""

from __future__ import annotations

import random

Pairs = tuple[tuple[int, int], ...]

ALL_PAIRS_UP_TO = 32  # nodes; above, n - 1 rounds would take too long
ROUNDS_ABOVE = 16  # partners of each node; a slow node shows after two
MORE_ROUNDS = 16  # at most, of pairs that were slow when all were measured at once (analysis/screening.py)


def rounds(nodes: int) -> tuple[Pairs, ...]:
    """Return every pair of ``nodes`` exactly once, by the circle method.

    An even number of nodes gives n - 1 rounds of n / 2 pairs; an odd one n rounds, in each of which one node
    is idle.
    """
    if nodes < 2:
        return ()
    ring: list[int | None] = list(range(nodes))
    if nodes % 2:
        ring.append(None)  # the partner of None is idle
    schedule_rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        schedule_rounds.append(
            tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(schedule_rounds)


def pairs_of(nodes: int) -> int:
    """Return the number of pairs in the scheduled rounds of ``nodes`` nodes."""
    return nodes * (nodes - 1) // 2 if nodes <= ALL_PAIRS_UP_TO else ROUNDS_ABOVE * (nodes // 2)


def schedule(nodes: int, *, seed: int = 0, night: int = 0, count: int | None = None) -> tuple[Pairs, ...]:
    """Return the rounds to run: all up to 32 nodes, above that some rounds over a shuffled ring.

    No pair occurs twice. The schedule is the same on every node for the same seed. Each ``night`` continues
    after the rounds of the previous one, so that all pairs are measured after (nodes - 1) / 16 nights if the
    order of the nodes is constant. ``count``: number of rounds, whatever the number of nodes.
    """
    all_rounds = rounds(nodes)
    number = count if count is not None else (len(all_rounds) if nodes <= ALL_PAIRS_UP_TO else ROUNDS_ABOVE)
    if number >= len(all_rounds):
        return all_rounds
    shuffle = random.Random(seed)
    positions = shuffle.sample(range(nodes), nodes)
    all_rounds = tuple(shuffle.sample(all_rounds, len(all_rounds)))
    offset = night * number
    selected = [all_rounds[(offset + index) % len(all_rounds)] for index in range(number)]
    return tuple(
        tuple((min(positions[a], positions[b]), max(positions[a], positions[b])) for a, b in pairs)
        for pairs in selected
    )
