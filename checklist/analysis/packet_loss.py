"""Localization of packet loss to a node, direction or link from each pair's TCP retransmissions.

Bandwidth hides loss: at 1 % loss the fastest message of a pair is unaffected. This module counts the segments
that TCP retransmitted, by pair and direction. Without a socket it uses the gap between a pair's slow messages
and its fastest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from checklist.analysis.busbw import GB
from checklist.measurements import Pair

LOSSY = 0.002  # share of retransmitted segments; a healthy link is one or two orders of magnitude below
SERIOUS = 0.01  # from here loss limits TCP's rate over any distance (Mathis et al., 1997)
LEAST_SEGMENTS = 5  # minimum retransmitted segments; fewer may be one burst
UNEVEN = 0.5  # limit for rate of slow messages / rate of the fastest
# A stall is a message below a tenth of the best rate, delayed by at least TCP's shortest retransmission
# timeout (TCP_RTO_MIN of Linux). Among 408 pairs of 34 healthy runs between network namespaces, at loads of 1
# to 28 on two cores, the worst had 0.69 of its best rate, a delay of 0.04 s and 0.04 % retransmitted
# segments. A carrier that is down for 3 s of every 6 gives 0.02 to 0.04, 3 s and 0.8 to 3 %.
STALLED, STALL_S = 0.1, 0.2
SIDE_SHARE = 2 / 3  # share of a node's pairs in one direction that must be bad to attribute it to that side
WITNESSES = 2  # minimum number of such pairs; a single one is a link fault
RERUN = 3  # pairs measured again in isolation for each fault

Ordered = tuple[int, int]
Kind = Literal["transmit", "receive", "link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Packet loss of one node, direction or link."""

    kind: Kind
    pairs: tuple[Ordered, ...]
    """Pairs with loss, worst first."""
    node: int | None
    """None for a link, which then connects the ends of the first pair."""
    rate: float
    """Share of the pairs' segments that were retransmitted; 0 if no socket reported it."""
    alone: bool | None
    """Whether the loss also occurs with nothing else running; None if not measured."""
    stall_s: float = 0.0
    """Longest stall of a message of those pairs, seconds; 0 without a stall."""

    @property
    def lasts(self) -> bool:
        """Whether the loss is reproducible: it occurred in every measurement."""
        return self.alone is True and (self.rate >= SERIOUS or not self.stall_s)

    @property
    def comes_and_goes(self) -> bool:
        """Whether the loss was serious and then absent, which does not clear the components."""
        return not self.lasts and (self.stall_s > 0 or (self.alone is False and self.rate >= SERIOUS))


def find(pairs: Iterable[Pair]) -> tuple[Loss, ...]:
    """Localize packet loss, worst first. Loss that occurs only under other traffic has ``alone`` False."""
    all_pairs = tuple(pairs)
    first = _by_pair(pair for pair in all_pairs if pair.first)
    isolated = _by_pair(pair for pair in all_pairs if pair.alone)
    lossy = {key for key, results in first.items() if _bad(results)}
    losses = [
        _loss(kind, node, links, first, isolated) for kind, node, links in _attribute(lossy, set(first))
    ]
    return tuple(sorted(losses, key=lambda loss: -loss.rate))


def suspects(pairs: Iterable[Pair]) -> tuple[Ordered, ...]:
    """Return pairs to measure again in isolation before a fault is reported."""
    unresolved = [pair for loss in find(pairs) if loss.alone is None for pair in loss.pairs[:RERUN]]
    return tuple(dict.fromkeys(unresolved))


def rate(pairs: Iterable[Pair]) -> float | None:
    """Return the share of retransmitted segments; None if no socket reported it."""
    counted = [pair for pair in pairs if pair.segments and pair.retransmitted is not None]
    segments = sum(pair.segments or 0 for pair in counted)
    return sum(pair.retransmitted or 0 for pair in counted) / segments if segments else None


def _by_pair(pairs: Iterable[Pair]) -> dict[Ordered, list[Pair]]:
    by_pair: dict[Ordered, list[Pair]] = {}
    for pair in pairs:
        if pair.gbytes_per_s is not None:  # another check handles failed pairs
            by_pair.setdefault((pair.src, pair.dst), []).append(pair)
    return by_pair


def stall(pair: Pair) -> float:
    """Return the delay of the pair's slow messages in seconds; 0 if it does not count as a stall."""
    best, slow = pair.gbytes_per_s, pair.gbytes_per_s_p95
    if not best or not slow or not pair.bytes or slow >= STALLED * best:
        return 0.0
    stalled_s = pair.bytes / GB * (1 / slow - 1 / best)
    return stalled_s if stalled_s >= STALL_S else 0.0


def _bad(results: list[Pair]) -> bool:
    """Return whether a path loses packets: a stall, a high rate, or, without counters, uneven messages."""
    loss_rate = rate(results)
    if any(stall(pair) for pair in results):
        return True
    if loss_rate is not None:
        return loss_rate >= LOSSY and sum(pair.retransmitted or 0 for pair in results) >= LEAST_SEGMENTS
    rated = [pair for pair in results if pair.gbytes_per_s_p95 is not None and pair.gbytes_per_s]
    return bool(rated) and all(
        (pair.gbytes_per_s_p95 or 0) < UNEVEN * (pair.gbytes_per_s or 0) for pair in rated
    )


def _attribute(lossy: set[Ordered], measured: set[Ordered]) -> list[tuple[Kind, int | None, list[Ordered]]]:
    """Return the fewest sides that explain the bad pairs, then links for the remaining pairs."""
    losses: list[tuple[Kind, int | None, list[Ordered]]] = []
    total = Counter(side for pair in measured for side in _sides(pair))
    rest = set(lossy)
    while rest:
        counts = Counter(side for pair in rest for side in _sides(pair))
        suspects = {s: count for s, count in counts.items() if count >= max(WITNESSES, SIDE_SHARE * total[s])}
        if not suspects:
            break
        side = max(suspects, key=lambda side: (suspects[side], side))
        chosen = [pair for pair in rest if side in _sides(pair)]
        losses.append((*side, chosen))
        rest -= set(chosen)
    links = sorted({(min(pair), max(pair)) for pair in rest})
    return [*losses, *(("link", None, [pair for pair in rest if set(pair) == set(link)]) for link in links)]


def _sides(pair: Ordered) -> tuple[tuple[Kind, int], tuple[Kind, int]]:
    return ("transmit", pair[0]), ("receive", pair[1])


def _loss(
    kind: Kind,
    node: int | None,
    links: list[Ordered],
    first: dict[Ordered, list[Pair]],
    isolated: dict[Ordered, list[Pair]],
) -> Loss:
    worst = sorted(links, key=lambda pair: -(rate(first[pair]) or 0.0))
    remeasured = [pair for pair in worst if pair in isolated]
    # Pooled, so that a single burst does not change the result
    repeats = [result for pair in remeasured for result in isolated[pair]]
    return Loss(
        kind=kind,
        node=node,
        pairs=tuple(worst),
        rate=rate(result for pair in worst for result in first[pair]) or 0.0,
        alone=_bad(repeats) if repeats else None,
        stall_s=max(stall(result) for pair in worst for result in (*first[pair], *isolated.get(pair, ()))),
    )
