"""Bandwidth as nccl-tests defines it, and latency and rate of a message fitted from a sweep.

S is the size, t the time of the slowest of n ranks. algbw = S / t; busbw = algbw * factor is the traffic on
the wires, which makes different n and different operations comparable (NVIDIA/nccl-tests, doc/PERFORMANCE.md
and the ``GetBw`` function of each test, at a0b82b2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KIB, MIB = 2**10, 2**20
GB = 1e9  # nccl-tests' GB/s are 10^9 bytes a second
SMALL_BYTES = 4 * KIB  # up to here latency dominates
LARGE_BYTES = 64 * MIB  # from here its cost is bandwidth, also over EFA, whose curve bends late
DECADE = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """A collective operation."""

    name: str
    counts: Literal["buffer", "total", "nothing"]
    """What S counts: one rank's buffer, all ranks' buffers together, or nothing (barrier)."""
    factor: Literal["reduce-and-spread", "others", "uneven", "one"]
    """busbw / algbw: 2(n-1)/n, (n-1)/n, (n-1/2)/n or 1."""


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(name="all_reduce", counts="buffer", factor="reduce-and-spread"),
        Op(name="all_gather", counts="total", factor="others"),
        Op(name="reduce_scatter", counts="total", factor="others"),
        Op(name="all_to_all", counts="total", factor="others"),
        Op(name="all_to_all_v", counts="total", factor="uneven"),
        Op(name="gather", counts="total", factor="others"),
        Op(name="scatter", counts="total", factor="others"),
        Op(name="broadcast", counts="buffer", factor="one"),
        Op(name="reduce", counts="buffer", factor="one"),
        Op(name="send_recv", counts="buffer", factor="one"),
        Op(name="barrier", counts="nothing", factor="one"),
    )
}


def bus_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw of an operation over ``ranks`` ranks."""
    kind = OPS[op].factor
    if kind == "one":
        return 1.0
    if kind == "uneven" and ranks > 1:
        return (ranks - 0.5) / ranks
    return (ranks - 1) / ranks * (2 if kind == "reduce-and-spread" else 1)


def uneven_parts(elements: int, ranks: int) -> list[int]:
    """Return the elements a rank of an uneven all-to-all sends to itself, the next rank, the one after, etc.

    Models tokens routed to experts: every other rank gets three times as much. All ranks send and receive the
    same total and keep half a part, so the traffic on the wires is known.
    """
    # Small and large parts alternate and add up to two equal parts; the last of an odd number is equal
    small, large = elements // 2, 2 * elements - elements // 2
    return [elements if 2 * (rank // 2) + 1 == ranks else (small, large)[rank % 2] for rank in range(ranks)]


def algbw(size_bytes: int, seconds: float) -> float:
    """Return algorithm bandwidth in GB/s (10^9 bytes a second); infinite for zero seconds."""
    return size_bytes / seconds / GB if seconds else math.inf


def busbw(op: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """Return bus bandwidth in GB/s (10^9 bytes a second)."""
    return algbw(size_bytes, seconds) * bus_factor(op, ranks)


def buffer_elements(op: str, size_bytes: int, element_bytes: int, ranks: int) -> int:
    """Return the elements of one rank's part for a message of S bytes, at least one.

    If S counts all ranks together, it is rounded down to a multiple of the ranks; :func:`actual_bytes`
    returns the resulting size.
    """
    shards = ranks if OPS[op].counts == "total" else 1
    return max(1, size_bytes // (element_bytes * shards))


def actual_bytes(op: str, elements: int, element_bytes: int, ranks: int) -> int:
    """Return the message size S of an operation whose part per rank has ``elements`` elements."""
    if OPS[op].counts == "nothing":
        return 0
    return elements * element_bytes * (ranks if OPS[op].counts == "total" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Model t = alpha + S / beta, each fitted to its part of the sweep; None if that part is missing."""

    alpha_s: float | None
    """Latency of a message: the median time up to 4 KiB."""
    beta_gbytes_per_s: float | None
    """Rate of large messages (algbw): the slope from 64 MiB, or over the sweep's largest decade."""
    beta_from_bytes: int | None
    """Smallest size in the fit of the slope."""

    @property
    def half_bytes(self) -> float | None:
        """n_1/2: the size at which half of beta is reached."""
        if self.alpha_s is None or self.beta_gbytes_per_s is None:
            return None
        return self.alpha_s * self.beta_gbytes_per_s * GB

    def seconds(self, size_bytes: int) -> float | None:
        """Predict the duration of a message."""
        if self.alpha_s is None or self.beta_gbytes_per_s is None:
            return None
        return self.alpha_s + size_bytes / (self.beta_gbytes_per_s * GB)


def fit(points: Iterable[tuple[int, float]]) -> Fit:
    """Fit (bytes, seconds) piecewise.

    A single line through the whole sweep is inaccurate: protocols change with the size, and the errors of
    large messages exceed the times of small ones.
    """
    times = sorted((size, seconds) for size, seconds in points if size > 0 and math.isfinite(seconds))
    small = [seconds for size, seconds in times if size <= SMALL_BYTES]
    large = [(size, seconds) for size, seconds in times if size >= LARGE_BYTES]
    if _sizes(large) < 2 and times:
        large = [point for point in times if point[0] * DECADE >= times[-1][0] and point[0] > SMALL_BYTES]
    rate = _rate(large)
    return Fit(
        alpha_s=statistics.median(small) if small else None,
        beta_gbytes_per_s=rate,
        beta_from_bytes=large[0][0] if rate is not None else None,
    )


def _rate(points: list[tuple[int, float]]) -> float | None:
    """Return GB/s from the slope of seconds over bytes; None if the slope is not positive."""
    if _sizes(points) < 2:
        return None
    slope = statistics.linear_regression([size for size, _ in points], [t for _, t in points]).slope
    return 1 / slope / GB if slope > 0 else None


def _sizes(points: list[tuple[int, float]]) -> int:
    return len({size for size, _ in points})
