"""Tiny models and packed rows for tests of variable-length attention."""

from __future__ import annotations

from typing import Any

from launchers.dataset.prepared import Row
from tests.launchers.engines.loop import families, runs

DOCUMENTS = runs.documents(5, seed=3)
WINDOW = 6  # shorter than the documents
WIDE = {"gemma4_text": {"global_head_dim": 264}}  # for the kernel of wide heads


def network_of(family: str) -> Any:
    """Return a family's tiny model with windows shorter than the documents, and heads wider than 256."""
    window = families.FAMILIES[family].get("sliding_window")
    values: dict[str, Any] = {"sliding_window": WINDOW} if window else {}
    return families.network(family, **values, **WIDE.get(family, {})).train()


def packed_rows() -> list[Row]:
    """Return two rows that contain all documents."""
    return [runs.joined(DOCUMENTS[:3]), runs.joined(DOCUMENTS[3:])]
