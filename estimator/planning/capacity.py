"""Instance types with low on-demand availability, and the reasons (``data/capacity.csv``)."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows
from estimator.planning.places import Place

TABLE = Path(__file__).parents[1] / "data" / "capacity.csv"


def why_rare(place: Place | None) -> str:
    """Return the reason for poor on-demand availability, as one clause; "" if it is usually available.

    Nodes of a cluster are present, or the run waits for them. Spot instances are never certain, so none is
    marked.
    """
    if place is None or place.cloud is None or place.spot or place.free_nodes or place.tier:
        return ""
    return _why_rare(place.cloud, place.name)


@lru_cache(maxsize=512)
def _why_rare(cloud: str, name: str) -> str:
    for pattern, reason in _rows().get(cloud, ()):
        if pattern.match(name):
            return reason
    return ""


@lru_cache(maxsize=1)
def _rows() -> dict[str, list[tuple[re.Pattern[str], str]]]:
    """Return patterns of instance names, with the reason, by cloud."""
    rules: dict[str, list[tuple[re.Pattern[str], str]]] = {}
    for row in load_rows(TABLE):
        pattern = re.compile(row["machines"], re.IGNORECASE)
        rules.setdefault(row["cloud"], []).append((pattern, row["reason"]))
    return rules
