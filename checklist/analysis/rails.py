"""Rails: each GPU of a node with its counterparts, over a network card and often a switch of its own.

What a rail carries is held against the other rails of the same two nodes, in the same measurement: what slows
down a whole node or path slows down all of them alike, and is not this module's affair.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from checklist.analysis.bottleneck import TAU, WITNESSES
from checklist.measurements import Pair

Kind = Literal["node", "transmit", "receive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRail:
    """A rail that is slow in the best of all measurements of a node, with whomever."""

    rail: int
    """The local rank of its GPUs."""
    nodes: tuple[int, ...]
    """One; all of them where it is the rail's own fault; the two of a run that has no others."""
    kind: Kind
    share: float
    """Of what the other rails of the same pairs carry."""


def slow_rails(pairs: Iterable[Pair]) -> list[SlowRail]:
    """Rails below ``TAU`` of their neighbours with every partner that a node has, of whom it takes two."""
    # By rail, node and whether it sends: of each partner the best share
    seen: dict[tuple[int, int, bool], dict[int, float]] = defaultdict(dict)
    nodes: set[int] = set()
    for pair in pairs:
        if len(pair.rails) < 2:
            continue
        nodes |= {pair.src, pair.dst}
        usual = statistics.median_high(pair.rails)
        for rail, carried in enumerate(pair.rails):
            for sends, node, partner in ((True, pair.src, pair.dst), (False, pair.dst, pair.src)):
                best = seen[rail, node, sends]
                best[partner] = max(best.get(partner, 0.0), carried / usual)
    found: list[SlowRail] = []
    for rail in sorted({rail for rail, _, _ in seen}):
        slow = {
            sends: {
                node: max(best.values())
                for (its, node, way), best in seen.items()
                if (its, way) == (rail, sends) and len(best) >= min(WITNESSES, len(nodes) - 1)
            }
            for sends in (True, False)
        }
        found += _of_rail(rail, {way: _below(shares) for way, shares in slow.items()}, nodes)
    return found


def slow_between(pairs: Iterable[Pair], src: int, dst: int) -> tuple[int, ...]:
    """Rails that are below ``TAU`` of their neighbours from one node to the other, each time."""
    shares: dict[int, float] = {}
    for pair in pairs:
        if (pair.src, pair.dst) == (src, dst) and len(pair.rails) > 1:
            usual = statistics.median_high(pair.rails)
            for rail, carried in enumerate(pair.rails):
                shares[rail] = max(shares.get(rail, 0.0), carried / usual)
    return tuple(sorted(_below(shares)))


def _below(shares: dict[int, float]) -> dict[int, float]:
    return {node: share for node, share in shares.items() if share < TAU}


def _of_rail(rail: int, slow: dict[bool, dict[int, float]], nodes: set[int]) -> list[SlowRail]:
    sends, receives = slow[True], slow[False]
    shares = [*sends.values(), *receives.values()]
    if sends.keys() == receives.keys() == nodes or (len(nodes) == 2 and shares):
        return [SlowRail(rail=rail, nodes=tuple(sorted(nodes)), kind="node", share=min(shares))]
    found = []
    for node in sorted(sends.keys() | receives.keys()):
        own = [way[node] for way in (sends, receives) if node in way]
        kind: Literal["node", "transmit", "receive"] = "transmit" if node in sends else "receive"
        found.append(
            SlowRail(rail=rail, nodes=(node,), kind="node" if len(own) == 2 else kind, share=min(own))
        )
    return found
