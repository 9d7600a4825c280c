"""Which pairs of a large run are worth a round of their own: the slowest of a pass in which all send at once.

The rounds of one night have only some of the pairs above 32 nodes. :mod:`checklist.probes.screen` times all
of them within minutes, beside each other's traffic. What is slow there is measured by rounds like any other
pair, and again alone before it is named: screening accuses nobody, it only spends rounds where they tell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from checklist.round_robin import MORE_ROUNDS, Pairs

SUSPECT = 0.87  # of what both ends reach with others; a link at 75 % is below it in spite of noise
REACHED = 0.75  # the quantile of an end's pairs that says what it reaches: a quarter may be crowded or slow

Floats = NDArray[np.float64]


def rates(best_s: Floats, size: int) -> Floats:
    """GB/s from node to node, of the seconds that each node saw for each distance; NaN: not measured.

    A message is over for both of its ends when it is over, so the shorter time of the two is nearer to its
    own: the longer one was another message's.
    """
    count = len(best_s)
    if count < 2:
        return np.full((count, count), np.nan)
    rate = np.full((count, count), np.nan)
    nodes = np.arange(count)
    for distance in range(1, count):
        to = (nodes + distance) % count
        seconds = np.fmin(best_s[:, distance - 1], best_s[to, distance - 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            rate[nodes, to] = np.where(seconds > 0, size / seconds / 1e9, np.nan)
    return rate


def slow_pairs(rate: Floats) -> list[tuple[int, int]]:
    """Unordered pairs of nodes that are slow one way or both, the slowest first."""
    if not np.isfinite(rate).any():
        return []
    with np.errstate(all="ignore"):
        sends, receives = (np.nanquantile(rate, REACHED, axis=axis) for axis in (1, 0))
        share = rate / np.minimum(sends[:, None], receives[None, :])
        share = np.fmin(share, share.T)
    low, high = np.nonzero(np.triu(share < SUSPECT, 1))
    order = np.argsort(share[low, high])
    return [(int(low[one]), int(high[one])) for one in order]


def more_rounds(pairs: list[tuple[int, int]], most: int = MORE_ROUNDS) -> tuple[Pairs, ...]:
    """Rounds in which no node is in two pairs; what doesn't fit into so many is left out."""
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for a, b in pairs:
        place = next((n for n, nodes in enumerate(busy) if a not in nodes and b not in nodes), len(rounds))
        if place == most:
            continue
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append((a, b))
        busy[place] |= {a, b}
    return tuple(tuple(one) for one in rounds)
