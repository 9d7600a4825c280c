"""Usage records for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from estimator.formatting import MIB
from estimator.rightsizing.usage import GpuUsage, Sizes, Usage

GIB = 2**30


def usage(memory_mib: float = 1000, *, at: float = 0.0, **values: Any) -> Usage:
    """A task that used so much memory, on 4 CPU and 8,000 MiB, for an hour."""
    given = Usage(
        flow="SomeFlow",
        step="train",
        run=str(int(at)),
        task="2",
        attempt=0,
        at=at,
        seconds=3600.0,
        ending="succeeded",
        requested=Sizes(cpu=4, memory_mib=8000, gpus=0),
        parameters=(("rows", "100"),),
        memory_bytes=int(memory_mib * MIB),
        cpu=1.5,
    )
    return replace(given, **values)


def gpu(peak_gib: float, *, name: str = "NVIDIA A100-SXM4-80GB", utilization: float = 0.5) -> GpuUsage:
    """One GPU of a task."""
    return GpuUsage(name=name, total_bytes=80 * GIB, peak_bytes=int(peak_gib * GIB), utilization=utilization)
