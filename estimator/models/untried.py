"""Causal models of transformers that no test here has trained: known by their names alone.

They are read from config.json by the usual names of its fields, estimated as Llamas of their widths, and
trained with a note. To test one, add it to ``FAMILIES`` in architectures.py and to the tests that
train every family, and take its row out of ``data/untried_families.csv``. Decoders of encoder-decoders,
encoders with an option for causal attention, and models of images or sound are no rows of it.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path

TABLE = Path(__file__).parents[1] / "data" / "untried_families.csv"


@lru_cache(maxsize=1)
def classes() -> dict[str, str]:
    """Return transformers' class for next-token prediction of each ``model_type``."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["family"]: row["class"] for row in csv.DictReader(file)}


def is_untried(family: str) -> bool:
    """Return whether transformers has this family but this package was not tested with it."""
    return family in classes()
