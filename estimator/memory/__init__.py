"""Peak memory of one process, by category, from closed formulas.

A training step has a few moments at which memory can peak: the loss, the backward passes, the optimizer's
step. Each is a sum of live tensors; the largest is the prediction. ``ranges`` derives two figures from it:
the memory that the run needs, and the values that counters will show.
docs/estimator.md has the source and error of each formula.

Letters as in the papers: P parameters, T tokens of one micro batch, h hidden size, f MLP width,
V vocabulary, L layers, n processes that share the states.
"""

from __future__ import annotations

from estimator.memory.diffusion import AVERAGE, ENCODERS, TEXTS
from estimator.memory.generation import CACHE
from estimator.memory.host import checkpoint_bytes, disk_bytes, host_bytes, runtime_bytes, shared_memory_bytes
from estimator.memory.moments import peak, saved_bytes
from estimator.memory.ranges import Range, needed_runtime_bytes, needs, shows
from estimator.memory.states import VISION, states
from estimator.plan import ALLOCATOR, RUNTIME, MemoryEstimate
from estimator.setup import Setup

CATEGORIES = (
    "weights",
    "master weights",
    "reference model",
    "reward model",
    "adapters",
    "gradients",
    "optimizer",
    VISION,
    AVERAGE,
    ENCODERS,
    TEXTS,
    CACHE,
    "activations",
    "logits and loss",
    "communication buffers",
    "optimizer temporaries",
    "quantization overhead",
    RUNTIME,
    ALLOCATOR,
)


def estimate(setup: Setup, *, capacity_bytes: int | None = None) -> MemoryEstimate:
    """Estimate the peak memory of one process, and the host memory of one of its nodes.

    Parameters
    ----------
    capacity_bytes:
        Usable memory of one GPU (on a CPU, of one process), if known.
    """
    needed_range, largest = needs(setup)
    shown_range = shows(setup, "process")
    runtime = needed_runtime_bytes(setup)
    cached = needed_range.likely_bytes - largest.active - runtime
    parts = largest.categories | {ALLOCATOR: cached, RUNTIME: runtime}
    on_cpu = setup.device == "cpu"
    estimate = MemoryEstimate(
        categories=tuple((name, parts[name]) for name in CATEGORIES if parts.get(name)),
        needs_range=(needed_range.lower_bytes, needed_range.upper_bytes),
        shows_bytes=shown_range.likely_bytes,
        shows_range=(shown_range.lower_bytes, shown_range.upper_bytes),
        capacity_bytes=None,
        host_bytes=needed_range.likely_bytes * setup.processes_per_node if on_cpu else host_bytes(setup),
        needs_basis=needed_range.basis,
        shows_basis=shown_range.basis,
        outside_bytes=None if on_cpu else runtime_bytes(setup),
    )
    return estimate.with_capacity(capacity_bytes)


def range_of(setup: Setup, kind: str, *, capacity_bytes: int | None = None) -> Range:
    """Return the range that one memory counter should show: "allocated", "active", "reserved", or "process".

    For "needed" it is what the run needs, whatever any counter shows.
    """
    return needs(setup)[0] if kind == "needed" else shows(setup, kind, capacity_bytes=capacity_bytes)


def active(setup: Setup) -> dict[str, int]:
    """Return the bytes by category at the moment of the peak, without runtime and fragmentation."""
    return dict(peak(setup).categories)


__all__ = [
    "CATEGORIES",
    "Range",
    "active",
    "checkpoint_bytes",
    "disk_bytes",
    "estimate",
    "host_bytes",
    "needs",
    "peak",
    "range_of",
    "runtime_bytes",
    "saved_bytes",
    "shared_memory_bytes",
    "shows",
    "states",
]
