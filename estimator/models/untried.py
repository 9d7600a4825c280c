"""Causal models of transformers that this package was not tested with; only their names are known.

Their config.json is read with the usual field names, they are estimated as a Llama of the same widths, and
their plans have a note. To test one, add it to ``FAMILIES`` in architectures.py and to the tests that train
every family, and remove its row of ``data/untried_families.csv``. The table excludes decoders of
encoder-decoders, encoders with optional causal attention, and models of images or sound.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows

TABLE = Path(__file__).parents[1] / "data" / "untried_families.csv"


@lru_cache(maxsize=1)
def classes() -> dict[str, str]:
    """Return transformers' class for next-token prediction of each ``model_type``."""
    return {row["family"]: row["class"] for row in load_rows(TABLE)}


def is_untried(family: str) -> bool:
    """Return whether transformers has this family but this package was not tested with it."""
    return family in classes()
