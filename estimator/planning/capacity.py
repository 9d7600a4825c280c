"""Capacity: which machines are rarely to be had when they are asked for, and why (``data/capacity.csv``)."""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path

from estimator.planning.places import Place

TABLE = Path(__file__).parents[1] / "data" / "capacity.csv"


def why_rare(place: Place | None) -> str:
    """Return the reason for poor on-demand availability, as one clause; "" if it is usually available.

    Nodes that a cluster has are there, or are waited for. Of spot machines none is sure, so none is marked.
    """
    if place is None or place.cloud is None or place.spot or place.there or place.tier:
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
    """By cloud, the beginnings of machines' names, as patterns, with the reason."""
    found: dict[str, list[tuple[re.Pattern[str], str]]] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            pattern = re.compile(row["machines"], re.IGNORECASE)
            found.setdefault(row["cloud"], []).append((pattern, row["reason"]))
    return found
