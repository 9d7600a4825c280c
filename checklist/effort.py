"""Amount of work and time limits of each profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checklist.analysis.busbw import MIB
from checklist.measurements import PhaseName
from checklist.registry import Profile

GIB = 1024 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of work of a profile. Sizes in bytes, per rank for operations with one buffer per rank."""

    largest_cpu: int
    """Largest message of the sweep over gloo."""
    largest_cuda: int
    """Largest message over NCCL; smaller if GPU memory is short."""
    pair_cpu: int
    """Message between two nodes without NCCL."""
    pair_cuda: int
    iterations: int
    """Timed repetitions per size."""
    load_s: float
    """Duration of the matrix products, in seconds."""
    storage_bytes: int
    dcgm_level: int
    """Level of NVIDIA's DCGM diagnostic (checklist/checks/gpu/dcgm_probe.py); 0 skips it."""
    phase_limits_s: Mapping[PhaseName, float]
    """Time limit of each phase, long enough to measure slow hosts."""
    op_limit_s: float
    """Time without progress of a rank after which its operation counts as hung."""


EFFORTS: dict[Profile, Effort] = {
    "quick": Effort(
        largest_cpu=4 * MIB,
        largest_cuda=128 * MIB,
        pair_cpu=4 * MIB,
        pair_cuda=64 * MIB,
        iterations=5,
        load_s=2.0,
        storage_bytes=32 * MIB,
        dcgm_level=0,
        phase_limits_s={"facts": 60, "mesh": 60, "diag": 60, "node": 90, "world": 120, "pairs": 120},
        op_limit_s=30,
    ),
    "standard": Effort(
        largest_cpu=64 * MIB,
        largest_cuda=8 * GIB,
        pair_cpu=16 * MIB,
        pair_cuda=512 * MIB,
        iterations=20,
        load_s=30.0,
        storage_bytes=512 * MIB,
        dcgm_level=0,
        phase_limits_s={"facts": 90, "mesh": 120, "diag": 60, "node": 600, "world": 900, "pairs": 900},
        op_limit_s=120,
    ),
    "deep": Effort(
        largest_cpu=256 * MIB,
        largest_cuda=16 * GIB,
        pair_cpu=64 * MIB,
        pair_cuda=2 * GIB,
        iterations=50,
        load_s=600.0,
        storage_bytes=4 * GIB,
        dcgm_level=2,
        phase_limits_s={"facts": 90, "mesh": 180, "diag": 900, "node": 1800, "world": 3600, "pairs": 3600},
        op_limit_s=300,
    ),
}
