"""Peak memory of one process, by category, from closed formulas.

A training step has four moments at which memory can peak: the loss, the start of the backward pass, its
end, and the optimizer's step. Each is the sum of what is alive then; the largest is the prediction.
docs/estimator.md tells where each formula is from and how far it is off.

Letters as in the papers: P parameters, T tokens of one micro batch, h hidden size, f MLP width,
V vocabulary, L layers, n processes that share the states.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.memory.buffers import DEEPSPEED_BUCKET
from estimator.memory.host import disk_bytes, host_bytes, runtime_bytes, shared_memory_bytes
from estimator.memory.logits import DEEPSPEED_LOSS_POSITIONS
from estimator.memory.moments import Peak, peak
from estimator.memory.residuals import LIVE, Residual, residual_of
from estimator.memory.states import NF4_SCALE_BYTES, NF4_WEIGHT_BYTES, states
from estimator.plan import MemoryEstimate
from estimator.setup import Setup

CATEGORIES = (
    "weights",
    "master weights",
    "reference model",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits and loss",
    "communication buffers",
    "optimizer temporaries",
    "NF4 overhead",
    "runtime",
    "fragmentation",
)


@dataclass(frozen=True, slots=True)
class Range:
    """What a counter of one process's memory should show at its peak, in bytes."""

    likely_bytes: int
    upper_bytes: int
    basis: str


def estimate(setup: Setup, *, capacity_bytes: int | None = None) -> MemoryEstimate:
    """Peak memory of one process, and the host memory of one of its nodes.

    Parameters
    ----------
    capacity_bytes:
        What one GPU (on a CPU, one process's share of the memory) offers, if known.
    """
    largest, residual = peak(setup), residual_of(setup)
    reserved = _reserved_bytes(largest, residual)
    runtime = runtime_bytes(setup)
    parts = largest.categories | {"fragmentation": reserved - largest.active, "runtime": runtime}
    width = residual.upper_for(setup.engine)
    upper = int(reserved * width) + runtime
    return MemoryEstimate(
        categories=tuple((name, parts[name]) for name in CATEGORIES if parts.get(name)),
        upper_bytes=upper,
        capacity_bytes=capacity_bytes,
        host_bytes=upper * setup.processes_per_node if setup.device == "cpu" else host_bytes(setup),
        basis=f"+{width - 1:.0%}: {residual.basis}",
    )


def range_of(setup: Setup, kind: str) -> Range:
    """What one counter of memory should show: likely and upper bytes of one process.

    ``kind`` is torch.cuda's "allocated", "active" or "reserved", or "process": the whole process. Active
    memory is allocated memory and what streams still hold; the formulas do not tell the two apart.
    """
    largest, residual = peak(setup), residual_of(setup, kind)
    likely = int(largest.active * residual.factor) if kind in LIVE else _reserved_bytes(largest, residual)
    outside = runtime_bytes(setup) if kind == "process" else 0
    width = residual.upper_for(setup.engine)
    basis = f"+{width - 1:.0%}: {residual.basis}"
    return Range(likely + outside, int(likely * width) + outside, basis)


def _reserved_bytes(largest: Peak, residual: Residual) -> int:
    return int((largest.active + largest.beside) * residual.factor)


def active(setup: Setup) -> dict[str, int]:
    """Bytes by category at the moment of the peak, without runtime and fragmentation."""
    return dict(peak(setup).categories)


__all__ = [
    "CATEGORIES",
    "DEEPSPEED_BUCKET",
    "DEEPSPEED_LOSS_POSITIONS",
    "NF4_SCALE_BYTES",
    "NF4_WEIGHT_BYTES",
    "Peak",
    "Range",
    "active",
    "disk_bytes",
    "estimate",
    "host_bytes",
    "peak",
    "range_of",
    "residual_of",
    "runtime_bytes",
    "shared_memory_bytes",
    "states",
]
