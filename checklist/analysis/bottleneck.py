"""The bottleneck model: what goes from i to j is the least of what i sends, j receives and the link carries.

So the best that i reached with anybody is a bound of its sending side, the best that anybody reached with j
one of its receiving side, and a pair that stays below both its ends' bounds has a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TAU = 0.8  # below this share of what is due a side or a link is slow; simulated in benchmarks/diagnosis.py
WITNESSES = 2  # well partners that must see a node slow before it is named
ROUND_SAMPLES = 8  # values of a round from which on its median says how crowded it was

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What follows from one pass of measurements; index of a side is the node, else the sample."""

    src: Ints
    dst: Ints
    value: Floats
    reference: float
    tx: Floats
    rx: Floats
    good_tx: Flags
    good_rx: Flags
    blamed_tx: Flags
    blamed_rx: Flags
    due: Floats
    """What each sample's ends could do, times how crowded its round was."""
    slow_link: Flags
    undecided: Flags
    crowded: tuple[int, ...]


def localise(
    nodes: int, first: dict[tuple[int, int], tuple[float, int]], spec: float | None, tau: float
) -> Bounds:
    """Bounds of all nodes from the first pass: {(src, dst): (GB/s, round)}, not empty.

    The reference is ``spec``, what one node's network should reach in GB/s, or the upper quartile of the
    sides' bounds where that is more or no spec is known.
    """
    ends = np.array(list(first), dtype=np.int64)
    src, dst = ends[:, 0], ends[:, 1]
    samples = np.array(list(first.values()), dtype=np.float64)
    value, rounds = samples[:, 0], samples[:, 1].astype(np.int64)
    tx, rx = np.full(nodes, np.nan), np.full(nodes, np.nan)
    np.fmax.at(tx, src, value)
    np.fmax.at(rx, dst, value)
    sides = np.concatenate([tx, rx])
    reached = float(np.percentile(sides[~np.isnan(sides)], 75, method="higher"))
    reference = max(reached, spec or 0.0)
    good_tx, good_rx = tx >= tau * reference, rx >= tau * reference
    blamed_tx = (tx < tau * reference) & (np.bincount(src, good_rx[dst], nodes) >= WITNESSES)
    blamed_rx = (rx < tau * reference) & (np.bincount(dst, good_tx[src], nodes) >= WITNESSES)
    ability = np.minimum(tx[src], rx[dst])
    crowding, crowded = _crowding(value, ability, rounds, tau)
    due = ability * crowding
    slow_link = value < tau * due
    # Between two ends that are well, the link's own rule has spoken
    explained = blamed_tx[src] | blamed_rx[dst] | slow_link | (good_tx[src] & good_rx[dst])
    undecided = (value < tau * reference * crowding) & ~explained
    return Bounds(
        src,
        dst,
        value,
        reference,
        tx,
        rx,
        good_tx,
        good_rx,
        blamed_tx,
        blamed_rx,
        due,
        slow_link,
        undecided,
        crowded,
    )


def _crowding(value: Floats, ability: Floats, rounds: Ints, tau: float) -> tuple[Floats, tuple[int, ...]]:
    """How much of its ends' ability the median pair of each sample's round reached, 1 at most.

    Pairs that run together can share a switch. What all of a round lose is no link's fault, so it is taken
    out before links are suspected; in small rounds one slow link would move the median, so it is left.
    """
    share = np.ones_like(value)
    crowded = []
    for number in np.unique(rounds):
        inside = rounds == number
        reached = value[inside & (ability > 0)] / ability[inside & (ability > 0)]
        if reached.size >= ROUND_SAMPLES:
            share[inside] = min(1.0, float(np.median(reached)))
            if share[inside][0] < tau:
                crowded.append(int(number))
    return share, tuple(crowded)
