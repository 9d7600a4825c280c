"""How measured memory compares with the formulas: what the allocator keeps beside, and how wide a range is.

The numbers are rows of ``data/residuals.csv``, which ``python -m estimator.published.fit`` writes from the
table of published measurements. Classes are few and told apart by what the allocator sees.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.setup import Setup

TABLE = Path(__file__).parent.parent / "data" / "residuals.csv"
LIVE = ("allocated", "active")  # what torch.cuda counts of tensors; the others count what is reserved


@dataclass(frozen=True, slots=True)
class Residual:
    """How measured memory compares with the formulas in one class of runs, for one kind of counter."""

    counter: str  # "live" or "held"
    name: str
    factor: float  # likely over the formulas' sum
    upper: float  # upper bound over likely
    elsewhere: float  # the same for engines that none of the runs used
    runs: int
    sources: int
    engines: tuple[str, ...]
    basis: str

    def upper_for(self, engine: str) -> float:
        """Upper bound over likely for one engine."""
        return self.upper if engine in self.engines else self.elsewhere


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, str], Residual]:
    """The rows of ``data/residuals.csv`` by (counter, class)."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [
            Residual(
                counter=row["counter"],
                name=row["class"],
                factor=float(row["factor"]),
                upper=float(row["upper"]),
                elsewhere=float(row["elsewhere"]),
                runs=int(row["runs"]),
                sources=int(row["sources"]),
                engines=tuple(row["engines"].split()),
                basis=row["basis"],
            )
            for row in csv.DictReader(file)
        ]
    return {(row.counter, row.name): row for row in rows}


def class_of(setup: Setup, counter: str) -> str:
    """The class of runs that a setup belongs to.

    Live tensors are as exact as the formulas. What is held on top depends on how blocks of memory come and
    go: eager recomputation cuts it into many sizes, compiled blocks into few.
    """
    if setup.device == "cpu":
        return "cpu"
    if setup.tensor > 1 or setup.pipeline > 1:
        return "tensor or pipeline parallel"
    if setup.zero_stage is not None:
        return "DeepSpeed"
    several = setup.world_size > 1
    if counter == "live":
        if several:
            return "several GPUs"
        return "one GPU, quantised" if setup.quantization != "none" else "one GPU"
    if not several:
        return "one GPU"
    if setup.compile:
        return "several GPUs, compiled"
    return "several GPUs, eager" + (", recomputing" if setup.checkpointing != "none" else "")


def residual_of(setup: Setup, kind: str = "reserved") -> Residual:
    """The row for a setup and a kind of counter: "allocated", "active", "reserved" or "process"."""
    counter = "live" if kind in LIVE else "held"
    return table()[counter, class_of(setup, counter)]
