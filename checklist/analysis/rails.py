"""Slow rails. A rail connects GPUs of equal local rank over their own network cards and often a switch.

A rail's bandwidth is compared with the other rails of the same two nodes in the same measurement. A slow node
or path slows down all rails equally and is out of scope here.
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
    """A rail that is slow even in a node's best measurement with any partner."""

    rail: int
    """The local rank of its GPUs."""
    nodes: tuple[int, ...]
    """One node; all nodes if the rail itself is at fault; both nodes of a run with two."""
    kind: Kind
    share: float
    """Bandwidth relative to the other rails of the same pairs."""


def slow_rails(pairs: Iterable[Pair]) -> list[SlowRail]:
    """Return rails below ``TAU`` of their neighbors with every partner of a node; needs two partners.

    In a run of two nodes one partner is enough.
    """
    # {(rail, node, whether it sends): {partner: best share}}
    best_share: dict[tuple[int, int, bool], dict[int, float]] = defaultdict(dict)
    nodes: set[int] = set()
    for pair in pairs:
        if len(pair.rails) < 2:
            continue
        nodes |= {pair.src, pair.dst}
        typical = statistics.median_high(pair.rails)
        for rail, gbytes in enumerate(pair.rails):
            for sends, node, partner in ((True, pair.src, pair.dst), (False, pair.dst, pair.src)):
                best = best_share[rail, node, sends]
                best[partner] = max(best.get(partner, 0.0), gbytes / typical)
    faults: list[SlowRail] = []
    for rail in sorted({rail for rail, _, _ in best_share}):
        slow = {
            sends: {
                node: max(best.values())
                for (rail_key, node, sending), best in best_share.items()
                if (rail_key, sending) == (rail, sends) and len(best) >= min(WITNESSES, len(nodes) - 1)
            }
            for sends in (True, False)
        }
        faults += _of_rail(rail, {sending: _below(shares) for sending, shares in slow.items()}, nodes)
    return faults


def slow_between(pairs: Iterable[Pair], src: int, dst: int) -> tuple[int, ...]:
    """Return rails that are below ``TAU`` of their neighbors from ``src`` to ``dst`` in every measurement."""
    shares: dict[int, float] = {}
    for pair in pairs:
        if (pair.src, pair.dst) == (src, dst) and len(pair.rails) > 1:
            typical = statistics.median_high(pair.rails)
            for rail, gbytes in enumerate(pair.rails):
                shares[rail] = max(shares.get(rail, 0.0), gbytes / typical)
    return tuple(sorted(_below(shares)))


def _below(shares: dict[int, float]) -> dict[int, float]:
    return {node: share for node, share in shares.items() if share < TAU}


def _of_rail(rail: int, slow: dict[bool, dict[int, float]], nodes: set[int]) -> list[SlowRail]:
    sends, receives = slow[True], slow[False]
    shares = [*sends.values(), *receives.values()]
    if sends.keys() == receives.keys() == nodes or (len(nodes) == 2 and shares):
        return [SlowRail(rail=rail, nodes=tuple(sorted(nodes)), kind="node", share=min(shares))]
    faults = []
    for node in sorted(sends.keys() | receives.keys()):
        both = [shares_by_node[node] for shares_by_node in (sends, receives) if node in shares_by_node]
        kind: Literal["node", "transmit", "receive"] = "transmit" if node in sends else "receive"
        faults.append(
            SlowRail(rail=rail, nodes=(node,), kind="node" if len(both) == 2 else kind, share=min(both))
        )
    return faults
