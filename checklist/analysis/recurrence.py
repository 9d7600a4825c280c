"""Intermittent faults over several nights: nodes or links that lost packets, and on how many nights.

A single night says little about a link that was healthy in isolation. The same node on several nights rules
out transient traffic as the cause.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from checklist.measurements import STRICT

NIGHTS = 3  # minimum with the same node or link; one or two may be transient traffic or switch maintenance
WITHIN_DAYS = 14  # requires about two sightings a week; also how long a repaired link stays in the history
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sightings:
    """One run that checked for intermittent faults."""

    __pydantic_config__ = STRICT
    unix: float
    nodes: tuple[str, ...]
    """Nodes that were checked."""
    seen: tuple[tuple[str, ...], ...] = ()
    """Nodes and links with a fault: a node, or both ends of a link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Faults of the same node or link on several nights."""

    names: tuple[str, ...]
    """A node, or both ends of a link."""
    nights: tuple[str, ...]
    """Days (UTC) with a fault."""
    looked: int
    """Number of nights on which it was checked."""

    @property
    def enough(self) -> bool:
        """Whether there are enough nights to rule out a transient cause."""
        return len(self.nights) >= NIGHTS

    @property
    def description(self) -> str:
        """Description of when and how often it was seen."""
        return f"on {len(self.nights)} of {self.looked} nights ({', '.join(self.nights)})"


def recent(sightings: Iterable[Sightings], now_unix: float) -> tuple[Sightings, ...]:
    """Return the runs of the last ``WITHIN_DAYS`` days."""
    return tuple(item for item in sightings if now_unix - WITHIN_DAYS * _DAY_S < item.unix <= now_unix)


def count_nights(names: Iterable[str], sightings: Iterable[Sightings]) -> Recurrence:
    """Count how often any of the named nodes had a fault."""
    names_of_group, all_runs = set(names), tuple(sightings)
    affected = [item for item in all_runs if any(names_of_group & set(group) for group in item.seen)]
    measured = [item for item in all_runs if names_of_group & set(item.nodes)]
    return Recurrence(
        names=tuple(sorted(names_of_group)),
        nights=_nights(affected),
        looked=len(_nights([*affected, *measured])),
    )


def recurring(sightings: Iterable[Sightings]) -> tuple[Recurrence, ...]:
    """Return nodes and links seen on at least ``NIGHTS`` nights, most frequent first.

    Each sighting is attributed to only one of them.
    """
    all_runs = tuple(sightings)
    unexplained = {(item.unix, group) for item in all_runs for group in item.seen}
    recurrences = []
    while unexplained:
        nights: dict[str, set[str]] = defaultdict(set)
        for unix, group in unexplained:
            for name in group:
                nights[name].add(_night(unix))
        worst_name = max(sorted(nights), key=lambda name: len(nights[name]))
        if len(nights[worst_name]) < NIGHTS:
            break
        explained = {(unix, group) for unix, group in unexplained if worst_name in group}
        groups = {frozenset(group) for _, group in explained}
        # Always the same other end: either end or the cable between them may be the cause
        names = next(iter(groups)) if len(groups) == 1 else frozenset((worst_name,))
        unexplained -= explained
        measured = [item for item in all_runs if names <= set(item.nodes)]
        recurrences.append(
            Recurrence(
                names=tuple(sorted(names)),
                nights=tuple(sorted(nights[worst_name])),
                looked=len({_night(item.unix) for item in measured} | nights[worst_name]),
            )
        )
    return tuple(recurrences)


def _nights(sightings: Iterable[Sightings]) -> tuple[str, ...]:
    return tuple(sorted({_night(item.unix) for item in sightings}))


def _night(unix: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix, datetime.timezone.utc):%Y-%m-%d}"
