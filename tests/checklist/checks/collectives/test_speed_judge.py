"""Judging of speeds by minimum values, peers and history."""

from __future__ import annotations

import dataclasses

from checklist.judging import thresholds
from checklist.measurements import Local, Measurements
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, records_of_runs, verdict_of, with_share


def test_one_slow_gpu_among_sixteen_is_named() -> None:
    result = judge(with_share(gpu_run(), 0.85, [11], "hbm_copy"), thresholds=thresholds.Table(()))
    assert [(fault.code, fault.nodes, fault.ranks) for fault in result.findings] == [
        ("straggler", ("host-1",), (11,))
    ]


def test_a_healthy_h200_at_its_power_limit_is_above_the_minimum_of_a_burst() -> None:
    """As measured: benchmarks/results/products_nvidia_h200.md, 8192, normal numbers."""
    burst = Local(rank=0, what="gemm_bf16", value=764.0, unit="TFLOPS")
    sustained = dataclasses.replace(burst, what="gemm_bf16_sustained", value=655.0)
    run = gpu_run(1, 1)
    h200 = tuple(dataclasses.replace(fact, gpu_names=("NVIDIA H200",)) for fact in run.facts)
    run = dataclasses.replace(run, facts=h200, locals=(burst, sustained))
    gemm = judge(run).check("gemm")
    figures = {figure.name: (figure.verdict, figure.expected) for figure in gemm.figures}
    assert figures == {"gemm_bf16": ("PASS", 730.9), "gemm_bf16_sustained": ("NO-VERDICT", None)}
    assert gemm.verdict == "PASS"


def test_a_gpu_slow_only_for_seconds_is_named_with_its_peers() -> None:
    run = gpu_run(1)
    sustained = [
        Local(
            rank=rank, what="gemm_bf16_sustained", value=560.0 if rank == 5 else 655.0 + rank, unit="TFLOPS"
        )
        for rank in range(8)
    ]
    result = judge(dataclasses.replace(run, locals=(*run.locals, *sustained)))
    faults = [fault for fault in result.findings if fault.check == "gemm"]
    ((found),) = [(fault.code, fault.verdict, fault.ranks) for fault in faults]
    assert found == ("straggler", "FAIL", (5,))


def test_a_measurement_that_failed_is_a_failure_of_its_node() -> None:
    run = gpu_run()
    broken = Local(rank=4, what="gemm_bf16", value=None, unit="TFLOPS", error="CUDA error: an illegal access")
    result = judge(dataclasses.replace(run, locals=(*run.locals, broken)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("local-failed", ("host-0",))]


A100 = "NVIDIA A100-SXM4-80GB"


def mixed_run() -> Measurements:
    """Two healthy nodes of eight H100 and two of eight A100."""
    run = gpu_run(4)
    old = tuple(
        dataclasses.replace(fact, gpu_names=(A100,) * 8, instance_type="p4de.24xlarge")
        if fact.node >= 2
        else fact
        for fact in run.facts
    )
    speeds = {"gemm_bf16": 265.0, "hbm_copy": 1700.0}
    locals_ = tuple(
        dataclasses.replace(local, value=speeds[local.what]) if local.rank >= 16 else local
        for local in run.locals
    )
    return dataclasses.replace(run, facts=old, locals=locals_)


def reported_faults(
    run: Measurements, table: thresholds.Table | None = None
) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (fault.code, fault.verdict, fault.ranks)
        for fault in judge(run, thresholds=table).findings
        if fault.check == "gemm"
    ]


def test_nodes_with_two_gpu_models_are_judged_by_their_own_minimum_and_peers() -> None:
    result = judge(mixed_run())
    assert [fault for fault in result.findings if fault.check in ("gemm", "hbm")] == []
    gemm = result.check("gemm")
    assert {(figure.rank or 0) < 16: figure.expected for figure in gemm.figures} == {
        True: 730.9,
        False: 249.3,
    }
    assert reported_faults(with_share(mixed_run(), 0.85, [20], "gemm_bf16")) == [
        ("below-floor", "FAIL", (20,))
    ]
    assert reported_faults(with_share(mixed_run(), 0.85, [20], "gemm_bf16"), thresholds.Table(())) == [
        ("straggler", "FAIL", (20,))
    ]


def test_gpus_are_compared_with_peers_of_their_nvlink_domain() -> None:
    run = gpu_run(8, 4)
    reported = tuple(dataclasses.replace(f, nvlink_domain=f"rack-{f.node // 4}.0") for f in run.facts)
    slower = with_share(dataclasses.replace(run, facts=reported), 0.93, range(28, 32), "gemm_bf16")
    assert reported_faults(slower, thresholds.Table(())) == [
        ("straggler", "WARN", (rank,)) for rank in range(28, 32)
    ]
    whole_rack = with_share(dataclasses.replace(run, facts=reported), 0.93, range(16, 32), "gemm_bf16")
    assert reported_faults(whole_rack, thresholds.Table(())) == []


def test_half_of_the_gpus_being_slow_gives_a_warning_that_names_them() -> None:
    slow = (1, 3, 4, 6)
    assert reported_faults(with_share(gpu_run(1), 0.7, slow, "gemm_bf16"), thresholds.Table(())) == [
        ("uneven", "WARN", slow)
    ]
    assert reported_faults(with_share(gpu_run(1), 0.93, slow, "gemm_bf16"), thresholds.Table(())) == []


def test_a_few_outliers_in_a_large_fleet_give_no_finding() -> None:
    run = with_share(with_share(gpu_run(32), 0.96, [0, 33], "gemm_bf16"), 1.06, [77, 130], "gemm_bf16")
    assert reported_faults(run, thresholds.Table(())) == []


def test_the_minimum_of_a_collective_over_two_node_kinds_is_the_lower_one() -> None:
    run = mixed_run()
    rows = tuple(
        dataclasses.replace(row, nodes=thresholds.Span())
        for row in thresholds.table().rows
        if row.system in ("p4de.24xlarge", "p5.48xlarge")
    )
    slow = dataclasses.replace(run.collectives[-1], busbw_gbytes_per_s=80.0)
    either = dataclasses.replace(run, collectives=(*run.collectives[:-1], slow))
    assert [
        f for f in judge(either, thresholds=thresholds.Table(rows)).findings if f.check == "bandwidth"
    ] == []
    of_one = thresholds.Table(tuple(row for row in rows if row.system == "p5.48xlarge"))
    assert verdict_of(judge(either, thresholds=of_one), "bandwidth") == "NO-VERDICT"


def test_all_gpus_below_the_minimum_give_one_cluster_wide_finding() -> None:
    result = judge(with_share(gpu_run(), 0.7), history=records_of_runs(judge(gpu_run())))
    assert [(fault.check, fault.code) for fault in result.findings] == [
        ("gemm", "below-floor"),
        ("hbm", "below-floor"),
    ]
    assert (result.verdict, result.bad_nodes, result.healthy_nodes) == ("FAIL", (), ())
    figure = result.check("gemm").figures[0]  # type: ignore[union-attr]
    assert (figure.basis, figure.expected) == ("floor", 730.9)
