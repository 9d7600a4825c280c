"""Bus bandwidth follows nccl-tests; latency and rate are fitted from a sweep."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checklist.analysis.busbw import (
    MIB,
    OPS,
    actual_bytes,
    algbw,
    buffer_elements,
    bus_factor,
    busbw,
    fit,
    uneven_parts,
)

# Worked by hand from nccl-tests' doc/PERFORMANCE.md: op, ranks, S, time in us, busbw in GB/s.
WORKED = [
    ("all_reduce", 8, 1 << 33, 31_390.0, 478.88),
    ("all_gather", 4, 4_000, 1.0, 3.0),
    ("reduce_scatter", 4, 4_000, 1.0, 3.0),
    ("all_to_all", 4, 4_000, 1.0, 3.0),
    ("gather", 4, 4_000, 1.0, 3.0),
    ("scatter", 4, 4_000, 1.0, 3.0),
    ("broadcast", 4, 4_000, 1.0, 4.0),
    ("reduce", 4, 4_000, 1.0, 4.0),
    ("send_recv", 4, 4_000, 1.0, 4.0),
    ("all_reduce", 4, 4_000, 1.0, 6.0),
]


@pytest.mark.parametrize(("op", "ranks", "size", "us", "expected"), WORKED)
def test_busbw_follows_the_definition_of_nccl_tests(
    op: str, ranks: int, size: int, us: float, expected: float
) -> None:
    assert busbw(op, size, us * 1e-6, ranks) == pytest.approx(expected, rel=1e-3)


def test_the_busbw_of_a_single_rank_is_zero() -> None:
    assert bus_factor("all_reduce", 1) == bus_factor("all_to_all_v", 1) == 0
    assert bus_factor("broadcast", 1) == 1
    assert actual_bytes("barrier", 1, 4, 8) == 0
    assert algbw(10**9, 1.0) == 1.0
    assert algbw(10**9, 0.0) == math.inf, "refused where it is judged; not an error of the probe"


@given(
    st.sampled_from(sorted(set(OPS) - {"barrier"})),
    st.integers(1, 1 << 34),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 512),
)
def test_moved_bytes_equal_the_requested_size_up_to_rounding(
    op: str, size: int, element: int, ranks: int
) -> None:
    moved = actual_bytes(op, buffer_elements(op, size, element, ranks), element, ranks)
    assert moved <= size or moved <= element * ranks
    assert moved > size - element * ranks


@given(st.integers(1, 4_000), st.integers(1, 512))
def test_an_uneven_all_to_all_has_an_even_total_and_its_busbw_counts_inter_rank_bytes(
    elements: int, ranks: int
) -> None:
    parts = uneven_parts(elements, ranks)
    assert (len(parts), sum(parts)) == (ranks, elements * ranks)
    assert bus_factor("all_to_all_v", ranks) == pytest.approx(
        sum(parts[1:]) / sum(parts), abs=0.51 / sum(parts)
    )
    assert ranks == 1 or max(parts) >= 3 * min(parts)


def sweep(alpha: float, beta: float, largest: int) -> list[tuple[int, float]]:
    """Return a sweep of a network with this latency and rate, with a protocol change in the middle."""
    sizes = [8 << (2 * step) for step in range(20) if 8 << (2 * step) <= largest]
    bend = [1.0 if size <= 4096 or size >= 64 * MIB else 1.6 for size in sizes]
    return [(size, (alpha + size / (beta * 1e9)) * factor) for size, factor in zip(sizes, bend, strict=True)]


def test_latency_and_rate_are_fitted_despite_a_bend_in_the_middle_of_the_curve() -> None:
    fitted = fit(sweep(69e-6, 478.0, 16 * 2**30))
    assert fitted.alpha_s == pytest.approx(69e-6, rel=0.01)
    assert fitted.beta_gbytes_per_s == pytest.approx(478.0, rel=0.01)
    assert fitted.beta_from_bytes >= 64 * MIB
    assert fitted.half_bytes == pytest.approx(69e-6 * 478e9, rel=0.02)
    assert fitted.seconds(2**30) == pytest.approx(69e-6 + 2**30 / 478e9, rel=0.02)


def test_a_sweep_that_ends_early_takes_its_rate_from_the_largest_decade_of_sizes() -> None:
    fitted = fit([(1 << power, 1e-4 + (1 << power) / 1e9) for power in range(3, 21)])
    assert fitted.beta_gbytes_per_s == pytest.approx(1.0)
    assert fitted.beta_from_bytes == 131_072  # 2^17: the smallest size within a tenth of 2^20


@pytest.mark.parametrize(
    "points",
    [[], [(8, 1e-5)], [(8, 1e-5), (2**20, 1e-3)], [(2**19, 2e-3), (2**20, 1e-3)]],
    ids=["nothing", "small only", "one large", "larger is faster"],
)
def test_a_fit_of_too_few_points_is_unknown(points: list[tuple[int, float]]) -> None:
    fitted = fit(points)
    assert fitted.beta_gbytes_per_s is None
    assert fitted.half_bytes is None
    assert fitted.seconds(1) is None
