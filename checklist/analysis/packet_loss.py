"""Whose packets are lost: from what each pair had to send again to the node, direction or link.

Bandwidth hides loss: with one packet of a hundred lost, the best message of a pair is as fast as ever. So
here it is the segments that TCP has sent again that count, pair by pair and direction by direction; where
there was no socket, how far a pair's slow messages are behind its best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from checklist.analysis.busbw import GB
from checklist.measurements import Pair

LOSSY = 0.002  # share of segments sent again; a link in order is one or two orders below
SERIOUS = 0.01  # from here TCP's rate over any distance is limited by it (Mathis et al., 1997)
LEAST_SEGMENTS = 5  # sent again: fewer may be one burst
UNEVEN = 0.5  # slow messages at less than this share of the best
# A stall is a message at less than a tenth of the best rate, held up for TCP's shortest retransmission
# timeout (TCP_RTO_MIN of Linux) or longer. Of the 408 pairs of 34 healthy runs among namespaces, at loads of
# 1 to 28 on two cores, the worst had 0.69 of its best and was held up for 0.04 s, and 0.04 % of its segments
# were sent again. A carrier that is away for 3 s in 6 has 0.02 to 0.04, 3 s and 0.8 to 3 %.
STALLED, STALL_S = 0.1, 0.2
SIDE_SHARE = 2 / 3  # of a node's pairs in one direction must be bad to be that side's fault
WITNESSES = 2  # and so many of them: one is a link
RERUN = 3  # pairs measured again alone for each fault

Ordered = tuple[int, int]
Kind = Literal["transmit", "receive", "link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Where packets are lost."""

    kind: Kind
    pairs: tuple[Ordered, ...]
    """The bad ones, the worst first."""
    node: int | None
    """None: a link, between the first pair's ends."""
    rate: float
    """Share of the segments of those pairs that were sent again; 0: no socket told it."""
    alone: bool | None
    """Whether it shows with nothing else running; None: that was not tried."""
    stall_s: float = 0.0
    """For how long the worst of those pairs' messages was held up, if it was a stall."""

    @property
    def lasts(self) -> bool:
        """Whether it was there each time: a fault that can be measured again."""
        return self.alone is True and (self.rate >= SERIOUS or not self.stall_s)

    @property
    def comes_and_goes(self) -> bool:
        """Whether it was serious, and then not any more: nothing is cleared by that."""
        return not self.lasts and (self.stall_s > 0 or (self.alone is False and self.rate >= SERIOUS))


def find(pairs: Iterable[Pair]) -> tuple[Loss, ...]:
    """Who loses packets, the worst first. Those that only show beside other pairs have ``alone`` False."""
    every = tuple(pairs)
    first = _by_pair(pair for pair in every if pair.first)
    again = _by_pair(pair for pair in every if pair.alone)
    bad = {key for key, measured in first.items() if _bad(measured)}
    losses = [_loss(kind, node, chosen, first, again) for kind, node, chosen in _blame(bad, set(first))]
    return tuple(sorted(losses, key=lambda loss: -loss.rate))


def suspects(pairs: Iterable[Pair]) -> tuple[Ordered, ...]:
    """Pairs to measure again alone, before anybody is accused."""
    unsure = [pair for loss in find(pairs) if loss.alone is None for pair in loss.pairs[:RERUN]]
    return tuple(dict.fromkeys(unsure))


def rate(pairs: Iterable[Pair]) -> float | None:
    """The share of the segments that were sent again; None: no socket told it."""
    counted = [pair for pair in pairs if pair.segments and pair.retransmitted is not None]
    sent = sum(pair.segments or 0 for pair in counted)
    return sum(pair.retransmitted or 0 for pair in counted) / sent if sent else None


def _by_pair(pairs: Iterable[Pair]) -> dict[Ordered, list[Pair]]:
    by_pair: dict[Ordered, list[Pair]] = {}
    for pair in pairs:
        if pair.gbytes_per_s is not None:  # what failed altogether is another check's
            by_pair.setdefault((pair.src, pair.dst), []).append(pair)
    return by_pair


def stall(pair: Pair) -> float:
    """By how many seconds a slow message of the pair was held up; 0: it was not, as stalls go."""
    best, slow = pair.gbytes_per_s, pair.gbytes_per_s_p95
    if not best or not slow or not pair.bytes or slow >= STALLED * best:
        return 0.0
    held = pair.bytes / GB * (1 / slow - 1 / best)
    return held if held >= STALL_S else 0.0


def _bad(measured: list[Pair]) -> bool:
    lost = rate(measured)
    if any(stall(pair) for pair in measured):
        return True
    if lost is not None:
        return lost >= LOSSY and sum(pair.retransmitted or 0 for pair in measured) >= LEAST_SEGMENTS
    rated = [pair for pair in measured if pair.gbytes_per_s_p95 is not None and pair.gbytes_per_s]
    return bool(rated) and all(
        (pair.gbytes_per_s_p95 or 0) < UNEVEN * (pair.gbytes_per_s or 0) for pair in rated
    )


def _blame(bad: set[Ordered], measured: set[Ordered]) -> list[tuple[Kind, int | None, list[Ordered]]]:
    """The fewest sides that explain the bad pairs, then links for what is left."""
    blamed: list[tuple[Kind, int | None, list[Ordered]]] = []
    every = Counter(side for pair in measured for side in _sides(pair))
    left = set(bad)
    while left:
        hit = Counter(side for pair in left for side in _sides(pair))
        guilty = {s: count for s, count in hit.items() if count >= max(WITNESSES, SIDE_SHARE * every[s])}
        if not guilty:
            break
        side = max(guilty, key=lambda side: (guilty[side], side))
        chosen = [pair for pair in left if side in _sides(pair)]
        blamed.append((*side, chosen))
        left -= set(chosen)
    links = sorted({(min(pair), max(pair)) for pair in left})
    return [*blamed, *(("link", None, [pair for pair in left if set(pair) == set(link)]) for link in links)]


def _sides(pair: Ordered) -> tuple[tuple[Kind, int], tuple[Kind, int]]:
    return ("transmit", pair[0]), ("receive", pair[1])


def _loss(
    kind: Kind,
    node: int | None,
    chosen: list[Ordered],
    first: dict[Ordered, list[Pair]],
    again: dict[Ordered, list[Pair]],
) -> Loss:
    worst = sorted(chosen, key=lambda pair: -(rate(first[pair]) or 0.0))
    tried = [pair for pair in worst if pair in again]
    # Together they are many enough that one burst more or less changes nothing
    repeated = [one for pair in tried for one in again[pair]]
    return Loss(
        kind=kind,
        node=node,
        pairs=tuple(worst),
        rate=rate(one for pair in worst for one in first[pair]) or 0.0,
        alone=_bad(repeated) if repeated else None,
        stall_s=max(stall(one) for pair in worst for one in (*first[pair], *again.get(pair, ()))),
    )
