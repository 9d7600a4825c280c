"""Ratios of measured memory to the formulas: offset of each counter and width of its range.

The numbers are rows of ``data/residuals.csv``, which ``python -m benchmarks.published.refit`` writes from the
table of published measurements. The few classes differ in their allocations. Bytes of weights,
gradients and optimizer states are exact, so factors and widths only apply to the rest: activations, logits,
buffers. On a CPU, whose C library does not return freed memory, they apply to all bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows, parse_row
from estimator.setup import Setup

TABLE = Path(__file__).parent.parent / "data" / "residuals.csv"
LIVE = ("allocated", "active")  # counters of live tensors; the others count reserved memory
VARYING = "varying lengths"


@dataclass(frozen=True, slots=True)
class Residual:
    """Ratio of measured memory to the formulas in one class of runs, for one counter.

    95 % of the runs from sources outside the fit are between ``lower`` and ``upper``.
    """

    counter: str  # "live" or "held"
    name: str
    factor: float  # likely over predicted bytes, without states
    lower: float  # lower end over likely bytes
    upper: float  # upper end over likely bytes
    runs: int  # of this class
    sources: int
    basis: str


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, str], Residual]:
    """Return the rows of ``data/residuals.csv`` by (counter, class)."""
    rows = [Residual(name=row["class"], **parse_row(Residual, row)) for row in load_rows(TABLE)]
    return {(row.counter, row.name): row for row in rows}


def varies(setup: Setup) -> bool:
    """Return whether batches of varying length leave freed blocks that later tensors cannot reuse.

    Not with the longest batch first, whose blocks fit all later batches, nor with expandable segments, which
    merge freed memory (PyTorch, c10/cuda/CUDACachingAllocator.cpp).
    """
    return not (setup.fixed_length or setup.longest_first or setup.expandable_segments)


def class_of(setup: Setup, counter: str) -> str:
    """Return the class of runs that a setup belongs to.

    Formulas cover live tensors. Memory held in addition depends on the sizes of allocations: compiled blocks
    have few sizes, eager recomputation many, batches of varying length the most.
    """
    if setup.device == "cpu":
        return "cpu"
    several_ranks = setup.world_size > 1 and setup.schedule != "split"
    if counter == "held" and varies(setup):
        return VARYING
    if setup.tensor > 1 or (setup.pipeline > 1 and several_ranks):
        return "tensor or pipeline parallel"
    if setup.zero_stage is not None:
        return "DeepSpeed"
    if counter == "live":
        if several_ranks:
            return "several GPUs"
        return "one GPU, quantized" if setup.quantization != "none" else "one GPU"
    if not several_ranks:
        return "one GPU"
    if setup.compile:
        return "several GPUs, compiled"
    return "several GPUs, eager" + (", recomputing" if setup.checkpointing != "none" else "")


def residual_of(setup: Setup, kind: str = "reserved") -> Residual:
    """Return the row for a setup and a kind of counter: "allocated", "active", "reserved" or "process"."""
    counter = "live" if kind in LIVE else "held"
    return table()[counter, class_of(setup, counter)]
