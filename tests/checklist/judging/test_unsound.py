"""Impossible measurements become findings on their reporter and do not affect others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from checklist import result as results
from checklist.measurements import Measurements
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, records_of_runs, verdict_of, with_facts, with_pairs

BAD = [math.nan, math.inf, -3.0, 0.0, 1e9]


def with_local(run: Measurements, rank: int, measurement: str, value: float) -> Measurements:
    reported = tuple(
        dataclasses.replace(item, value=value) if (item.rank, item.what) == (rank, measurement) else item
        for item in run.locals
    )
    return dataclasses.replace(run, locals=reported)


def with_pair(run: Measurements, src: int, dst: int, value: float) -> Measurements:
    reported = tuple(
        dataclasses.replace(pair, gbytes_per_s=value) if (pair.src, pair.dst) == (src, dst) else pair
        for pair in run.pairs
    )
    return dataclasses.replace(run, pairs=reported)


def reported_findings(result: Result) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    return [(fault.check, fault.code, fault.nodes, fault.suspects) for fault in result.findings]


@pytest.mark.parametrize("value", BAD)
def test_an_impossible_gpu_measurement_gives_a_warning_and_is_excluded_from_the_peer_median(
    value: float,
) -> None:
    result = judge(with_local(gpu_run(), 11, "gemm_bf16", value))
    assert reported_findings(result) == [("gemm", "bad-figure", (), ("host-1",))]
    assert "rank 11 (host-1)" in result.headline
    assert (result.verdict, verdict_of(result, "gemm"), result.healthy_nodes) == ("WARN", "WARN", ("host-0",))
    gemm = result.check("gemm")
    assert gemm.nodes == ("host-0",)
    assert [figure for figure in gemm.figures if figure.rank == 11] == []
    least = next(record.value for record in result.records if record.op == "gemm_bf16")
    assert least == 760.0
    assert results.from_json(results.to_json(result)) == result


@pytest.mark.parametrize("value", BAD)
def test_an_impossible_pair_measurement_names_its_reporter_and_is_not_the_reference(value: float) -> None:
    result = judge(with_pair(cpu_run(12), 3, 7, value))
    assert reported_findings(result) == [("pairs", "bad-figure", (), ("host-3",))]
    assert "as reported by host-3 to host-7" in result.headline
    assert result.diagnosis.reference_gbytes_per_s == pytest.approx(45, rel=0.1)
    assert result.bad_nodes == ()


def test_a_slow_node_is_named_in_addition_to_an_impossible_measurement() -> None:
    slow = with_pairs(cpu_run(6), Cluster(nodes=6, transmit={2: 0.25}))
    result = judge(with_pair(slow, 0, 1, 1e9))
    assert result.bad_nodes == ("host-2",)
    assert ("pairs", "bad-figure", (), ("host-0",)) in reported_findings(result)
    assert (result.verdict, verdict_of(result, "pairs")) == ("FAIL", "FAIL")


def test_a_check_with_only_impossible_measurements_has_no_verdict() -> None:
    run = gpu_run()
    for rank in range(16):
        run = with_local(run, rank, "gemm_bf16", math.nan)
    result = judge(run)
    assert (result.verdict, verdict_of(result, "gemm"), result.healthy_nodes) == (
        "NO-VERDICT",
        "NO-VERDICT",
        (),
    )
    assert {fault.ranks for fault in result.findings} == {(rank,) for rank in range(16)}


@pytest.mark.parametrize("value", BAD)
def test_an_impossible_measurement_is_not_used_as_a_baseline(value: float) -> None:
    healthy = judge(gpu_run())
    past = records_of_runs(healthy, runs=3)
    worse = [dataclasses.replace(record, value=value) for record in past]
    assert judge(gpu_run(), history=worse).verdict == "PASS"
    ruined: Any = [record for pair in zip(past, worse, strict=True) for record in pair]
    slower = with_local(gpu_run(), 3, "hbm_copy", 2400.0)
    expected = judge(slower, history=past)
    assert [fault.title for fault in judge(slower, history=ruined).findings] == [
        fault.title for fault in expected.findings
    ]


@pytest.mark.parametrize("offset", [math.nan, math.inf])
def test_a_nan_clock_offset_does_not_pass(offset: float) -> None:
    result = judge(with_facts(gpu_run(), 8, clock_offset_s=offset))
    assert reported_findings(result) == [("clock", "bad-figure", (), ("host-1",))]
    assert verdict_of(result, "clock") == "NO-VERDICT"


def test_an_impossible_measurement_does_not_clear_an_earlier_failure() -> None:
    sick = judge(with_local(gpu_run(), 3, "gemm_bf16", 600.0))
    repetitions = judge(with_local(gpu_run(), 3, "gemm_bf16", math.nan), open_failures=sick.open_failures())
    assert (repetitions.verdict, repetitions.bad_nodes) == ("FAIL", ("host-0",))
    assert judge(gpu_run(), open_failures=sick.open_failures()).verdict == "PASS"


def test_an_impossible_time_of_a_collective_is_reported_with_its_valid_ones() -> None:
    last = dataclasses.replace(gpu_run().collectives[-1], seconds_median=-1.0)
    result = judge(gpu_run(collectives=(*gpu_run().collectives[:-1], last)))
    assert (verdict_of(result, "correctness"), verdict_of(result, "bandwidth")) == ("PASS", "NO-VERDICT")
    assert [fault.check for fault in result.findings] == ["bandwidth"]
    assert result.busbw_gbytes_per_s is None


def test_an_impossible_measurement_of_an_unselected_check_is_not_reported() -> None:
    from checklist.registry import select

    run = with_local(gpu_run(), 3, "gemm_bf16", math.nan)
    assert judge(run, checks=select(skip=["gemm"])).verdict == "PASS"


@pytest.mark.parametrize(("count", "other_reason"), [(1, ""), (2, "And 1 more"), (3, "And 2 more")])
def test_a_finding_counts_other_impossible_measurements_of_the_same_source(
    count: int, other_reason: str
) -> None:
    run = with_local(gpu_run(), 11, "gemm_bf16", math.nan)
    (bad,) = [item for item in run.locals if (item.rank, item.what) == (11, "gemm_bf16")]
    peers = [
        dataclasses.replace(bad, what=name) for name in ("gemm_bf16_sustained", "gemm_fp32")[: count - 1]
    ]
    [fault] = judge(dataclasses.replace(run, locals=(*run.locals, *peers))).findings
    assert ("more of its figures" in fault.title) == bool(other_reason)
    assert other_reason in fault.title
