"""Selection of extra pairs to measure in a large run: the slowest of a pass in which all nodes send at once.

Above 32 nodes, the rounds of one night cover only some of the pairs.
:mod:`checklist.checks.collectives.screen_probe` times all of them within minutes, under each other's traffic.
Pairs that are slow there are measured in rounds like any other pair, and again in isolation before a fault is
reported. Screening itself never reports a fault; it only directs rounds to the pairs where they are most
informative.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from checklist.round_robin import MORE_ROUNDS, Pairs

SUSPECT = 0.87  # share of what both ends reach with others; a link at 75 % stays below it despite noise
REACHED = 0.75  # quantile of an end's pairs taken as what it reaches; a quarter may be congested or slow

Floats = NDArray[np.float64]


def rates(best_s: Floats, size: int) -> Floats:
    """Convert each node's seconds per ring distance to a node-by-node matrix of GB/s; NaN: not measured.

    A message ends at the same time on both ends, so the shorter of the two times is closer to its duration;
    the longer one includes another message.
    """
    count = len(best_s)
    rate = np.full((count, count), np.nan)
    nodes = np.arange(count)
    for distance in range(1, count):
        to = (nodes + distance) % count
        seconds = np.fmin(best_s[:, distance - 1], best_s[to, distance - 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            rate[nodes, to] = np.where(seconds > 0, size / seconds / 1e9, np.nan)
    return rate


def slow_pairs(rate: Floats) -> list[tuple[int, int]]:
    """Return unordered pairs of nodes that are slow in at least one direction, slowest first."""
    if not np.isfinite(rate).any():
        return []
    with np.errstate(all="ignore"):
        sends, receives = (np.nanquantile(rate, REACHED, axis=axis) for axis in (1, 0))
        share = rate / np.minimum(sends[:, None], receives[None, :])
        share = np.fmin(share, share.T)
    low, high = np.nonzero(np.triu(share < SUSPECT, 1))
    order = np.argsort(share[low, high])
    return [(int(low[index]), int(high[index])) for index in order]


def more_rounds(pairs: list[tuple[int, int]], limit: int = MORE_ROUNDS) -> tuple[Pairs, ...]:
    """Pack pairs into at most ``limit`` rounds without repeated nodes; pairs that do not fit are dropped."""
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for a, b in pairs:
        index = next((n for n, nodes in enumerate(busy) if a not in nodes and b not in nodes), len(rounds))
        if index == limit:
            continue
        if index == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[index].append((a, b))
        busy[index] |= {a, b}
    return tuple(tuple(round_pairs) for round_pairs in rounds)
