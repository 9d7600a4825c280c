"""Detection of shared bottlenecks: pairs that are fast in isolation and slow whenever several send at once.

An oversubscribed uplink looks like this, because in isolation each pair has the whole uplink. A round that
was slow once may have met another job's traffic, and many active hosts may overload something other than the
network. So the slow couples of one round are measured together again ``REPEATS`` times, alternating with an
equal number of couples from a healthy round as controls. A bottleneck is reported only if the couples are
slow in every repeat and every control is healthy in every repeat.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from checklist.analysis.bottleneck import TAU
from checklist.analysis.second_pass import best_of
from checklist.measurements import Pair
from checklist.round_robin import Pairs

REPEATS = 2
FEWEST = 2  # minimum number of couples that send at once
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Couples to measure together again: two lists of equal length, no node twice within either."""

    shared: Pairs
    controls: Pairs


@dataclass(frozen=True, slots=True)
class Shared:
    """Ordered pairs that slow each other down; ``share``: median of bandwidth together / in isolation."""

    links: tuple[Link, ...]
    share: float


def select_repeat(pairs: Iterable[Pair]) -> Repeat | None:
    """Select the couples to measure together again; None if there are fewer than ``FEWEST`` of either list.

    ``shared``: the couples that were slow in one round but not in isolation, of the round with the most of
    them. ``controls``: as many couples of the largest round without such a couple.
    """
    all_pairs = tuple(pairs)
    isolated = _Isolated(all_pairs)
    shared: list[Link] = []
    controls: list[Link] = []
    for shares in _rounds(all_pairs, isolated):
        slow = [link for link, share in shares.items() if share < TAU and isolated.is_known(link)]
        unaffected = [link for link, share in shares.items() if share >= TAU]
        shared = max(shared, slow, key=len)
        controls = max(controls, [] if slow else unaffected, key=len)
    count = min(len(shared), len(controls))
    return Repeat(tuple(shared[:count]), tuple(controls[:count])) if count >= FEWEST else None


def find(pairs: Iterable[Pair]) -> Shared | None:
    """Evaluate the repeated rounds; None if nothing is shared or a control was slow too."""
    all_pairs = tuple(pairs)
    isolated = _Isolated(all_pairs)
    if any(isolated.share(pair) < TAU for pair in all_pairs if pair.repeat == "control"):
        return None
    at_once: dict[int, dict[Link, float]] = defaultdict(dict)
    for pair in all_pairs:
        if pair.repeat == "shared":
            at_once[pair.round][pair.src, pair.dst] = isolated.share(pair)
    shares_by_cut: dict[frozenset[Link], list[dict[Link, float]]] = defaultdict(list)
    for shares in at_once.values():
        shares_by_cut[frozenset(shares)].append(shares)
    slow: dict[Link, float] = {}
    for links, times in shares_by_cut.items():
        best = {link: max(shares[link] for shares in times) for link in links}
        slow_links = {link: share for link, share in best.items() if share < TAU}
        if len(times) >= REPEATS and len(slow_links) >= FEWEST:
            slow |= slow_links
    return Shared(tuple(sorted(slow)), statistics.median(slow.values())) if slow else None


class _Isolated:
    """Isolated bandwidth of each pair, GB/s; for pairs without one, the median of the others."""

    def __init__(self, pairs: tuple[Pair, ...]) -> None:
        self._by_link = {link: value for link, (value, _) in best_of(p for p in pairs if p.alone).items()}
        self._middle = statistics.median(self._by_link.values()) if self._by_link else 0.0

    def share(self, pair: Pair) -> float:
        """Return measured / isolated bandwidth; 1 without a reference."""
        isolated = self._by_link.get((pair.src, pair.dst), self._middle)
        return (pair.gbytes_per_s or 0.0) / isolated if isolated > 0 else 1.0

    def is_known(self, ends: Link) -> bool:
        """Return whether a direction of the couple was measured in isolation and carried data."""
        return any(self._by_link.get(link, 0.0) > 0 for link in (ends, ends[::-1]))


def _rounds(pairs: tuple[Pair, ...], isolated: _Isolated) -> list[dict[Link, float]]:
    """Return the couples of each round, in first-sent order, with the lower share of their two directions."""
    at_once: dict[int, dict[Link, float]] = defaultdict(dict)
    for pair in pairs:
        if pair.first:
            at_once[pair.round][pair.src, pair.dst] = isolated.share(pair)
    shares_by_round: dict[frozenset[frozenset[int]], dict[Link, float]] = {}
    for number in sorted(at_once):
        members = frozenset(frozenset(link) for link in at_once[number])
        lower = shares_by_round.setdefault(members, dict(at_once[number]))
        for link, share in at_once[number].items():
            oriented = link if link in lower else link[::-1]
            lower[oriented] = min(lower[oriented], share)
    return list(shares_by_round.values())
