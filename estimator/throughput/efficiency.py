"""What GPUs make of the work: a few coefficients by architecture and kind of kernels, from published runs.

``data/efficiency.csv`` holds one row for each, with the number of published runs behind it and their
sources; ``python -m benchmarks.fit_throughput`` fits them again. An architecture without a row is unknown.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from estimator.hardware.catalogue import Gpu
from estimator.setup import Setup

TABLE = Path(__file__).parents[1] / "data" / "efficiency.csv"

Kernels = Literal["eager", "compiled", "fused"]


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of ``data/efficiency.csv``.

    ``rows`` published runs constrain it; 0: it is taken from the ``source`` alone.
    """

    value: float
    rows: int
    source: str


@dataclass(frozen=True, slots=True)
class Efficiency:
    """All coefficients, by (name, scope); scope "*" holds where there is none of its own."""

    table: Mapping[tuple[str, str], Coefficient]

    def get(self, name: str, *scopes: str) -> float | None:
        """The value in the first of the scopes that has one, then of "*"; None where there is none."""
        for scope in (*scopes, "*"):
            coefficient = self.table.get((name, scope))
            if coefficient is not None:
                return coefficient.value
        return None

    def of(self, name: str, *scopes: str) -> float:
        """The value in the first of the scopes that has one, then of "*"; KeyError where there is none."""
        value = self.get(name, *scopes)
        if value is None:
            raise KeyError(f"{TABLE.name} has no {name} for {', '.join(scopes) or '*'}")
        return value


def kernels(setup: Setup) -> Kernels:
    """Kind of kernels: hand-fused (TransformerEngine in Megatron), compiled by torch, or one op at a time."""
    if setup.engine == "megatron":
        return "fused"
    return "compiled" if setup.compile else "eager"


def products_share(gpu: Gpu, table: Efficiency) -> float | None:
    """Share of the dense peak that matrix products reach; None without a published run on such a GPU."""
    if gpu.architecture is None:
        return None
    share = table.get("products", gpu.name)
    if share is None and ("products", gpu.architecture) in table.table:
        share = table.of("products", gpu.architecture)
    return share


def low_precision_gain(setup: Setup, gpu: Gpu, table: Efficiency) -> float | None:
    """How much faster products are in the setup's 8- or 4-bit recipe than in bf16; None without a run."""
    if setup.fp8 == "none":
        return 1.0
    recipe = f"{gpu.architecture} {setup.fp8}"
    return table.get("gain", f"{recipe} {kernels(setup)}", recipe)


@lru_cache(maxsize=1)
def published() -> Efficiency:
    """The coefficients that ship with the package."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Efficiency(
        {
            (row["coefficient"], row["scope"]): Coefficient(
                float(row["value"]), int(row["rows"]), row["source"]
            )
            for row in rows
        }
    )


def basis_of(setup: Setup, gpu: Gpu, table: Efficiency) -> str:
    """What a speed rests on, and how far it lies from what was published, in one clause."""
    share = products_share(gpu, table) or 0.0
    kind, method = kernels(setup), "adapters" if setup.adapters else "full training"
    text = f"products at {share:.0%} of the peak"
    exact = table.table.get(("runs", f"{gpu.architecture} {kind} {method}"))
    if exact is not None:
        runs = f"{exact.rows} published runs of {method} with {kind} kernels"
        text += f", after {runs} on {gpu.architecture} ({exact.source})"
    else:
        of_architecture = table.table.get(("runs", gpu.architecture or ""))
        count = of_architecture.rows if of_architecture is not None else 0
        text += (
            f", after {count} published runs on {gpu.architecture}; "
            f"interpolated, as none of them is {method} with {kind} kernels"
        )
    if setup.model.experts and kind != "fused":
        text += "; experts at the rate of Megatron's kernels, as no others are published"
    if ("runs", gpu.name) not in table.table:
        text += f"; none on the {gpu.name} itself"
    return text
