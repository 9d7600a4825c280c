"""What comes and goes, over nights: who lost packets on how many of them, and whether a link or a node.

One night says little of a link that was well when it was measured alone. The same node on several says that
it is no passing traffic.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from checklist.measurements import STRICT

NIGHTS = 3  # with the same node or link: one or two may be traffic that passes, or a switch's maintenance
WITHIN_DAYS = 14  # then it has to come twice a week; a link that was mended is forgotten after as long
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One run that has looked for what comes and goes."""

    __pydantic_config__ = STRICT
    unix: float
    nodes: tuple[str, ...]
    """Those that it has looked at."""
    seen: tuple[tuple[str, ...], ...] = ()
    """With whom it was seen: a node, or both ends of a link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """The same node or link on several nights."""

    names: tuple[str, ...]
    """A node, or both ends of a link."""
    nights: tuple[str, ...]
    """The days (UTC) on which it was seen."""
    looked: int
    """On so many it was looked for."""

    @property
    def enough(self) -> bool:
        """Whether it is no passing matter any more."""
        return len(self.nights) >= NIGHTS

    @property
    def words(self) -> str:
        """When and how often."""
        return f"on {len(self.nights)} of {self.looked} nights ({', '.join(self.nights)})"


def recent(looks: Iterable[Look], now_unix: float) -> tuple[Look, ...]:
    """Those of the last ``WITHIN_DAYS`` days."""
    return tuple(look for look in looks if now_unix - WITHIN_DAYS * _DAY_S < look.unix <= now_unix)


def of(names: Iterable[str], looks: Iterable[Look]) -> Recurrence:
    """How often any of those was seen."""
    wanted, every = set(names), tuple(looks)
    seen = [look for look in every if any(wanted & set(group) for group in look.seen)]
    looked = [look for look in every if wanted & set(look.nodes)]
    return Recurrence(
        names=tuple(sorted(wanted)), nights=_nights(seen), looked=len(_nights([*seen, *looked]))
    )


def recurring(looks: Iterable[Look]) -> tuple[Recurrence, ...]:
    """Who was seen on ``NIGHTS`` nights or more, the most often seen first; each sighting counts for one."""
    every = tuple(looks)
    left = {(look.unix, group) for look in every for group in look.seen}
    found = []
    while left:
        nights: dict[str, set[str]] = defaultdict(set)
        for unix, group in left:
            for name in group:
                nights[name].add(_night(unix))
        most = max(sorted(nights), key=lambda name: len(nights[name]))
        if len(nights[most]) < NIGHTS:
            break
        own = {(unix, group) for unix, group in left if most in group}
        groups = {frozenset(group) for _, group in own}
        # Always the same other end: nobody knows which of the two it is, or the wire between them
        names = next(iter(groups)) if len(groups) == 1 else frozenset((most,))
        left -= own
        looked = [look for look in every if names <= set(look.nodes)]
        found.append(
            Recurrence(
                names=tuple(sorted(names)),
                nights=tuple(sorted(nights[most])),
                looked=len({_night(look.unix) for look in looked} | nights[most]),
            )
        )
    return tuple(found)


def _nights(looks: Iterable[Look]) -> tuple[str, ...]:
    return tuple(sorted({_night(look.unix) for look in looks}))


def _night(unix: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix, datetime.timezone.utc):%Y-%m-%d}"
