"""Efficiency of GPUs: a few coefficients by architecture and kind of kernel, fitted to published runs.

``data/efficiency.csv`` holds one row for each, with the number of published runs behind it and their
sources; ``python -m benchmarks.fit_throughput`` fits them again. The best rate of a matrix product on a GPU
is measured (``data/gpus.csv``); the share of it that training reaches is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from estimator.data import load_rows
from estimator.formatting import format_count
from estimator.hardware.catalogue import Gpu
from estimator.setup import Setup
from estimator.vocabulary import product_type

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
    """Coefficients by (name, scope); scope "*" is the default."""

    table: Mapping[tuple[str, str], Coefficient]
    capped: bool = True  # rates of products end at the data sheet's peak; a fit needs them without that kink

    def get(self, name: str, *scopes: str) -> float | None:
        """Return the value in the first of the scopes that has one, then of "*"; None where there is none."""
        for scope in (*scopes, "*"):
            coefficient = self.table.get((name, scope))
            if coefficient is not None:
                return coefficient.value
        return None

    def of(self, name: str, *scopes: str) -> float:
        """Return the value of the first matching scope, then of "*"; raises KeyError for none."""
        value = self.get(name, *scopes)
        if value is None:
            raise KeyError(f"{TABLE.name} has no {name} for {', '.join(scopes) or '*'}")
        return value


def kernels(setup: Setup) -> Kernels:
    """Kind of kernels: hand-fused (TransformerEngine in Megatron), compiled by torch, or one op at a time."""
    if setup.engine == "megatron":
        return "fused"
    return "compiled" if setup.compile else "eager"


def products_rate(gpu: Gpu, precision: str, table: Efficiency) -> float | None:
    """Return the FLOP/s of matrix products in training; None if rate and peak of the GPU are unknown.

    It is the best measured rate of the GPU (power and clocks differ by up to a factor of two within an
    architecture) times a share that all GPUs have in common, corrected by runs on the GPU or architecture.
    """
    best = best_product(gpu, precision, table)
    if best is None:
        return None
    factor = next(
        (table.of("products of", scope) for scope in chips(gpu) if ("products of", scope) in table.table), 1.0
    )
    peak = gpu.peak_flops(product_type(precision))
    rate = best * table.of("products") * factor
    if peak is None or not table.capped:
        return rate
    return min(rate, peak)  # a card's own clocks may be above the data sheet's


def chips(gpu: Gpu) -> tuple[str, str]:
    """Return the scopes of a GPU: its name and its chip family ("Ampere 8.0": A100, "Ampere 8.6": A10)."""
    return gpu.name, f"{gpu.architecture} {gpu.compute_capability or ''}".strip()


def best_product(gpu: Gpu, precision: str, table: Efficiency) -> float | None:
    """Return the FLOP/s of the best matrix product: measured, otherwise the usual share of the peak."""
    dtype, matmul_dtype = product_type(precision), "bf16" if gpu.bf16 else "fp32"
    if gpu.measured_tflops is not None and dtype == matmul_dtype:
        return gpu.measured_tflops * 1e12
    peak, matmul_peak = gpu.peak_flops(dtype), gpu.peak_flops(matmul_dtype)
    if peak is None:
        return None
    if gpu.measured_tflops is not None and matmul_peak is not None:
        return peak * gpu.measured_tflops * 1e12 / matmul_peak
    best_share = table.get("best product", gpu.architecture or "")
    return None if best_share is None else peak * best_share


def attention_scopes(setup: Setup, gpu: Gpu) -> tuple[str, str]:
    """Return the scopes of the attention rate: by kind of kernels, then by FlashAttention version."""
    return f"{gpu.architecture} {kernels(setup)}", f"{gpu.architecture} {setup.flash_version}"


def range_scope(setup: Setup) -> str:
    """Return the scope of runs whose predictions may be further off than others: engine, experts, nodes."""
    parts = (setup.engine, "experts" if setup.model.experts else "", "nodes" if setup.nodes > 1 else "")
    return " ".join(filter(None, parts))


def low_precision_gain(setup: Setup, gpu: Gpu, table: Efficiency) -> float | None:
    """Return the speedup of products in the setup's 8- or 4-bit recipe over bf16; None without a run."""
    if setup.fp8 == "none":
        return 1.0
    return table.get("gain", *recipes(setup, gpu))


def recipes(setup: Setup, gpu: Gpu) -> tuple[str, str]:
    """Return the scopes of the gain of an 8- or 4-bit recipe: with this kind of kernels, then with any."""
    recipe = f"{gpu.architecture} {setup.fp8}"
    return f"{recipe} {kernels(setup)}", recipe


@lru_cache(maxsize=1)
def published() -> Efficiency:
    """Return the coefficients that ship with the package."""
    return Efficiency(
        {
            (row["coefficient"], row["scope"]): Coefficient(
                float(row["value"]), int(row["rows"]), row["source"]
            )
            for row in load_rows(TABLE)
        }
    )


def basis_of(setup: Setup, gpu: Gpu, table: Efficiency) -> str:
    """Describe the basis of a speed and its distance from published runs, in one clause."""
    rate = products_rate(gpu, setup.precision, table) or 0.0
    peak = gpu.peak_flops(product_type(setup.precision))
    kind, method = kernels(setup), "adapters" if setup.adapters else "full training"
    text = f"matrix products at {rate / 1e12:,.3g} TFLOPS"
    if peak is not None and setup.precision != "fp32":
        text += f", {rate / peak:.0%} of the peak"
    exact = table.table.get(("runs", f"{gpu.architecture} {kind} {method}"))
    if exact is not None:
        runs = f"{format_count(exact.rows, 'published run')} of {method} with {kind} kernels"
        text += f", from {runs} on {gpu.architecture} ({exact.source})"
    else:
        architecture_runs = table.table.get(("runs", gpu.architecture or ""))
        text += (
            f", from {format_count(architecture_runs.rows, 'published run')} on {gpu.architecture}; "
            f"interpolated, as none of them is {method} with {kind} kernels"
            if architecture_runs is not None
            else f", interpolated from its best product, as no run on {gpu.architecture} is published"
        )
    if setup.model.experts and kind != "fused":
        text += "; experts at the rate of Megatron's kernels, as no others are published"
    if ("runs", gpu.name) not in table.table:
        text += f"; no published run on the {gpu.name} itself"
    return text
