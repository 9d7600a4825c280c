"""Two figures derived from the formulas' peak: memory that a run needs, and values that counters will show.

They differ by the cache of PyTorch's allocator: it is released when memory is short, so a run needs far less
memory than counters show on a larger GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from estimator.memory.host import nccl_alone_bytes, runtime_bytes
from estimator.memory.moments import Peak, peak
from estimator.memory.residuals import LIVE, Residual, residual_of
from estimator.models import DiffusionSpec
from estimator.plan import GIB
from estimator.setup import Setup

# The smallest GPU on which a run survives, over its live tensors beyond the states: 1.05 to 1.18 in a
# simulation of PyTorch's allocator that releases cached blocks when memory is short. Of 600 published runs,
# 216 of which took the largest micro batch that their GPU held, 2 % need less (benchmarks/published). With
# expandable segments nearly nothing is lost: a run that ran out of memory at 58.8 GB of live tensors on a GPU
# of 80 GB passes with them (NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-memory-tuning).
ALLOCATOR = 1.10
ALLOCATOR_EXPANDABLE = 1.05

# CUDA's context within the memory that CUDA offers: the smallest measured value (host.CUDA_CONTEXT_BYTES).
# The reservation of the driver is excluded (data/gpus.csv, vram_cuda_GiB).
CONTEXT_NEEDED_BYTES = GIB // 2

# Minimum of NCCL. Its buffers take up to 1.5 GiB if memory is available
# (host.NCCL_BYTES); of the published runs that fill their GPU none leaves more than this.
NCCL_NEEDED_BYTES = GIB // 2


@dataclass(frozen=True, slots=True)
class Range:
    """A figure of one process's memory, in bytes: likely, and the ends of its range."""

    likely_bytes: int
    lower_bytes: int
    upper_bytes: int
    basis: str


def needs(setup: Setup) -> tuple[Range, Peak]:
    """Return the minimum memory of the run: states, live tensors, allocator overhead, context.

    On a CPU no memory is released while a process runs, so it needs the maximum that it may show. The second
    value is the decisive moment of the step.
    """
    if setup.device == "cpu":
        shown, largest = _shows(setup, "process")
        return Range(shown.upper_bytes, shown.likely_bytes, shown.upper_bytes, shown.basis), largest
    residual = residual_of(setup, "active")
    overhead = ALLOCATOR_EXPANDABLE if setup.expandable_segments else ALLOCATOR
    largest = peak(setup, residual.factor * overhead, held=False)
    states = largest.states_bytes + needed_runtime_bytes(setup)
    dynamic = largest.dynamic_bytes * residual.factor
    range_needed = Range(
        likely_bytes=states + int(dynamic * overhead),
        lower_bytes=states + int(dynamic * residual.lower),
        upper_bytes=states + int(dynamic * overhead * residual.upper),
        basis=_basis(residual, setup),
    )
    return range_needed, largest


def needed_runtime_bytes(setup: Setup) -> int:
    """Return the memory of a process without tensors, outside of PyTorch's allocator, in bytes."""
    if setup.device == "cpu":
        return runtime_bytes(setup)
    nccl_bytes = NCCL_NEEDED_BYTES if setup.world_size > 1 else 0
    return CONTEXT_NEEDED_BYTES + max(nccl_bytes, nccl_alone_bytes(setup))


def shows(setup: Setup, kind: str, *, capacity_bytes: int | None = None) -> Range:
    """Return the range of the highest value that one memory counter should show.

    ``kind`` is torch.cuda's "allocated", "active" or "reserved", or "process": the whole process, as
    nvidia-smi has it. Active memory is allocated memory plus blocks held by streams; the formulas do not
    distinguish them. No counter shows more than a GPU with ``capacity_bytes`` offers.
    """
    shown = _shows(setup, kind)[0]
    if capacity_bytes is None or setup.device == "cpu":
        return shown
    limit = max(capacity_bytes - (0 if kind == "process" else CONTEXT_NEEDED_BYTES), 0)
    return replace(
        shown,
        likely_bytes=min(shown.likely_bytes, limit),
        lower_bytes=min(shown.lower_bytes, limit),
        upper_bytes=min(shown.upper_bytes, limit),
    )


def _shows(setup: Setup, kind: str) -> tuple[Range, Peak]:
    residual = residual_of(setup, kind)
    counts_reserved, on_cpu = kind not in LIVE, setup.device == "cpu"
    largest = peak(setup, 1.0 if on_cpu else residual.factor, held=counts_reserved)
    dynamic, fixed = largest.dynamic_bytes + counts_reserved * largest.reserved_extra, largest.states_bytes
    if on_cpu:
        dynamic, fixed = dynamic + fixed, 0
    outside = runtime_bytes(setup) if kind == "process" else 0
    likely_dynamic = dynamic * residual.factor
    shown = Range(
        likely_bytes=fixed + int(likely_dynamic) + outside,
        lower_bytes=fixed + int(likely_dynamic * residual.lower) + outside,
        upper_bytes=fixed + int(likely_dynamic * residual.upper) + outside,
        basis=_basis(residual, setup),
    )
    return shown, largest


def _basis(residual: Residual, setup: Setup) -> str:
    """Describe the source of a range, with both ends relative to the likely value."""
    scope = " of language models" if isinstance(setup.model, DiffusionSpec) else ""
    lower, upper = residual.lower - 1, residual.upper - 1
    return f"activations and buffers {lower:+.0%} to {upper:+.0%}, from {residual.basis}{scope}"
