"""Who is measured with whom: rounds of pairs in which no node is in two pairs."""

from __future__ import annotations

import random

Pairs = tuple[tuple[int, int], ...]

ALL_PAIRS_UP_TO = 32  # nodes; above, n - 1 rounds would take too long
ROUNDS_ABOVE = 16  # so each node meets this many others; a slow node shows after two
MORE_ROUNDS = 16  # at most, of pairs that were slow when all were measured at once (analysis/screening.py)


def rounds(nodes: int) -> tuple[Pairs, ...]:
    """Every pair of ``nodes`` exactly once, by the circle method.

    An even number gives n - 1 rounds of n / 2 pairs; an odd one n rounds in each of which one node rests.
    """
    if nodes < 2:
        return ()
    ring: list[int | None] = list(range(nodes))
    if nodes % 2:
        ring.append(None)  # whoever meets None rests
    every_round = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        opposite = zip(ring[:half], reversed(ring[half:]), strict=True)
        every_round.append(
            tuple((min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None)
        )
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(every_round)


def pairs_of(nodes: int) -> int:
    """How many pairs of ``nodes`` the rounds to run have."""
    return nodes * (nodes - 1) // 2 if nodes <= ALL_PAIRS_UP_TO else ROUNDS_ABOVE * (nodes // 2)


def schedule(nodes: int, *, seed: int = 0, night: int = 0, count: int | None = None) -> tuple[Pairs, ...]:
    """The rounds to run: all of them up to 32 nodes, above that some of them over a shuffled ring.

    No pair comes twice. ``count`` asks for that many rounds whatever the number of nodes. Every node makes
    the same schedule from the same seed. Each ``night`` has the rounds that follow the last one's, so that
    all pairs were measured after (nodes - 1) / 16 of them, if the nodes stay in the same order.
    """
    every = rounds(nodes)
    number = count if count is not None else (len(every) if nodes <= ALL_PAIRS_UP_TO else ROUNDS_ABOVE)
    if number >= len(every):
        return every
    shuffle = random.Random(seed)
    seats = shuffle.sample(range(nodes), nodes)
    every = tuple(shuffle.sample(every, len(every)))
    begin = night * number
    chosen = [every[(begin + place) % len(every)] for place in range(number)]
    return tuple(
        tuple((min(seats[a], seats[b]), max(seats[a], seats[b])) for a, b in pairs) for pairs in chosen
    )
