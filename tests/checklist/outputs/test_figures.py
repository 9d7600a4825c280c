"""Formatting of measurements: units, ranges, and values by rank."""

from __future__ import annotations

import pytest

from checklist.measurements import Local
from checklist.outputs.figures import amount, by_rank, of_check, with_sources
from checklist.result import CheckResult, Figure
from checklist.verdict import judge
from tests.checklist.runs import cpu_run, gpu_run


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(66e-6, "s", "66 µs"), (2.5e-3, "s", "2.5 ms"), (1.5, "s", "1.5 s"), (45.26, "GB/s", "45.3 GB/s"),
     (2853.4, "GB/s", "2853 GB/s")],
)  # fmt: skip
def test_a_value_is_shown_with_three_digits_and_its_unit(value: float, unit: str, expected: str) -> None:
    assert amount(value, unit) == expected


def test_each_check_shows_the_range_over_its_gpus() -> None:
    result = judge(gpu_run())
    reported = {check.check: of_check(check) for check in result.checks}
    assert reported["gemm"] == "gemm_bf16 760 to 763 TFLOPS (at least 731)"
    assert reported["latency"] == "all_reduce latency 70 µs, barrier latency 70 µs"
    assert (reported["bandwidth"], reported["mesh"]) == (
        "all_reduce fp32 450 GB/s (expected 363)",
        "slowest 10 ms",
    )
    assert reported["ranks"] == ""
    sources = {row[1]: row for row in with_sources(result)}
    assert sources["gemm_bf16"][2:4] == ("760 to 763 TFLOPS", "at least 731")
    assert sources["gemm_bf16"][4].startswith("stas00/ml-engineering")
    assert sources["all_reduce fp32"][4].startswith("32 ports x 100 Gbit/s (EFA v2)")
    assert sources["SM clock"][4] == "median of the peers in this run"


def test_long_lists_are_shortened_and_each_name_shows_its_largest_message() -> None:
    figures = [
        Figure(name=name, value=value, unit="GB/s", verdict="PASS", bytes=size)
        for name in "abcd"
        for value, size in ((1.0, 1024), (9.0, 4096))
    ]
    check = CheckResult(check="bandwidth", verdict="PASS", reason="", measured=True, figures=tuple(figures))
    assert of_check(check) == "a 9 GB/s, b 9 GB/s, c 9 GB/s and 1 more"


def test_each_rank_has_a_row_with_its_slowest_peer_copy() -> None:
    copies = tuple(
        Local(rank=1, what="peer_copy", value=value, unit="GB/s", peer=peer)
        for peer, value in ((0, 300.0), (2, 200.0))
    )
    failed = Local(rank=2, what="gemm_bf16", value=None, unit="TFLOPS", error="no memory")
    headers, rows = by_rank(judge(gpu_run(locals=(*gpu_run().locals, *copies, failed))))
    loaded = ("SM clock, MHz", "power, W", "temperature, °C")
    assert headers == ("rank", "node", "gemm_bf16, TFLOPS", "hbm_copy, GB/s", "peer_copy, GB/s", *loaded)
    assert rows[1] == ("1", "host-0", "762", "2856", "200", "1715", "690", "61")
    assert rows[9][:2] == ("9", "host-1")
    assert by_rank(judge(cpu_run(locals=())))[1] == ()
    assert "SM clock, MHz" not in by_rank(judge(cpu_run()))[0]
