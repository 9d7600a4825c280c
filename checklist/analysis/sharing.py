"""Pairs that are well alone and slow whenever some of them send at once: what they share carries less.

So an oversubscribed uplink shows: alone each pair has all of it. A round that was slow once may have met
another job's traffic, and many hosts at once may be too much for something else than the network. So the
slow couples of one round are measured together again, ``REPEATS`` times, in turn with as many couples of a
round that was well, as controls. Only what is slow each time, with every control well each time, is told.
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
FEWEST = 2  # couples at once
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Couples to measure together again, no node twice in either; as many of both."""

    shared: Pairs
    controls: Pairs


@dataclass(frozen=True, slots=True)
class Shared:
    """Ordered pairs that slow each other down, and the median of what each has then of what it has alone."""

    links: tuple[Link, ...]
    share: float


def repeat(pairs: Iterable[Pair]) -> Repeat | None:
    """The round with the most couples that were slow in it and well alone, and a round without any."""
    every = tuple(pairs)
    due = _Due(every)
    shared: list[Link] = []
    controls: list[Link] = []
    for shares in _rounds(every, due):
        slow = [couple for couple, share in shares.items() if share < TAU and due.is_known(couple)]
        well = [couple for couple, share in shares.items() if share >= TAU]
        shared = max(shared, slow, key=len)
        controls = max(controls, [] if slow else well, key=len)
    count = min(len(shared), len(controls))
    return Repeat(tuple(shared[:count]), tuple(controls[:count])) if count >= FEWEST else None


def find(pairs: Iterable[Pair]) -> Shared | None:
    """What the repeated rounds say; None: nothing is shared, or a control was slow too."""
    every = tuple(pairs)
    due = _Due(every)
    if any(due.share(pair) < TAU for pair in every if pair.repeat == "control"):
        return None
    at_once: dict[int, dict[Link, float]] = defaultdict(dict)
    for pair in every:
        if pair.repeat == "shared":
            at_once[pair.round][pair.src, pair.dst] = due.share(pair)
    ways: dict[frozenset[Link], list[dict[Link, float]]] = defaultdict(list)
    for shares in at_once.values():
        ways[frozenset(shares)].append(shares)
    slow: dict[Link, float] = {}
    for links, times in ways.items():
        best = {link: max(shares[link] for shares in times) for link in links}
        below = {link: share for link, share in best.items() if share < TAU}
        if len(times) >= REPEATS and len(below) >= FEWEST:
            slow |= below
    return Shared(tuple(sorted(slow)), statistics.median(slow.values())) if slow else None


class _Due:
    """What each pair has alone, GB/s; of one that was not measured so, the median of those that were."""

    def __init__(self, pairs: tuple[Pair, ...]) -> None:
        self._alone = {link: value for link, (value, _) in best_of(p for p in pairs if p.alone).items()}
        self._middle = statistics.median(self._alone.values()) if self._alone else 0.0

    def share(self, pair: Pair) -> float:
        """Of a measurement; 1 where there is nothing to hold it against."""
        due = self._alone.get((pair.src, pair.dst), self._middle)
        return (pair.gbytes_per_s or 0.0) / due if due > 0 else 1.0

    def is_known(self, couple: Link) -> bool:
        """Whether a direction of it was measured alone, and carried something."""
        return any(self._alone.get(link, 0.0) > 0 for link in (couple, couple[::-1]))


def _rounds(pairs: tuple[Pair, ...], due: _Due) -> list[dict[Link, float]]:
    """Of each round its couples, as they were sent first, with the lower share of their two directions."""
    at_once: dict[int, dict[Link, float]] = defaultdict(dict)
    for pair in pairs:
        if pair.first:
            at_once[pair.round][pair.src, pair.dst] = due.share(pair)
    found: dict[frozenset[frozenset[int]], dict[Link, float]] = {}
    for number in sorted(at_once):
        members = frozenset(frozenset(link) for link in at_once[number])
        lower = found.setdefault(members, dict(at_once[number]))
        for link, share in at_once[number].items():
            couple = link if link in lower else link[::-1]
            lower[couple] = min(lower[couple], share)
    return list(found.values())
