"""Processor time and peak memory of one call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 2**20
SECONDS_PER_MIB = 1.0
MEMORY_PER_MIB = 10 * MIB
SPARE_BYTES = 24 * MIB  # modules that are imported on the way, pieces that allocators keep


def resident_peak() -> int:
    """Return the peak of the resident memory since :func:`reset_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def reset_peak() -> int:
    """Reset the peak; returns the resident memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


@contextmanager
def held_to(size: int) -> Iterator[None]:
    """Fail the test if the block exceeds the limits for an input of ``size`` bytes: each MiB begun counts."""
    mib = -(-max(1, size) // MIB)
    memory_before, began = reset_peak(), time.process_time()
    yield
    seconds, memory = time.process_time() - began, resident_peak() - memory_before
    if seconds > SECONDS_PER_MIB * mib:
        pytest.fail(f"{seconds:.2f} s of processor time for {size:,} bytes")
    if memory > MEMORY_PER_MIB * mib + SPARE_BYTES:
        pytest.fail(f"{memory / MIB:,.0f} MiB of memory for {size:,} bytes")
