"""Figures against floors, peers and the past."""

from __future__ import annotations

import dataclasses

from checklist.judges import thresholds
from checklist.judges.speed import peers
from checklist.measurements import Local
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, past_of, verdict_of


def test_one_slow_gpu_among_sixteen_is_named() -> None:
    run = gpu_run()
    slow = tuple(
        dataclasses.replace(item, value=float(item.value or 0) * 0.85)
        if (item.rank, item.what) == (11, "hbm_copy")
        else item
        for item in run.locals
    )
    result = judge(dataclasses.replace(run, locals=slow), thresholds=thresholds.Table(()))
    assert [(fault.code, fault.nodes, fault.ranks) for fault in result.findings] == [
        ("straggler", ("host-1",), (11,))
    ]


def test_peers_need_to_be_four_and_both_rules_to_agree() -> None:
    assert peers([100, 50, 100]) is None
    assert peers([100.0, 100.0, 100.0, 100.0, 50.0]) == ["PASS"] * 4 + ["FAIL"]
    assert peers([100.0, 100.1, 99.9, 100.0, 97.0]) == ["PASS"] * 5, "an outlier, but only 3 % below"
    assert peers([100.0, 80.0, 60.0, 90.0, 70.0]) == ["PASS"] * 5, "far below, but so is everybody"
    assert peers([100.0, 100.1, 99.9, 100.0, 93.0])[-1:] == ["WARN"]  # type: ignore[index]


def test_the_floor_is_asked_before_peers_and_history() -> None:
    run = gpu_run()
    slow = tuple(dataclasses.replace(item, value=float(item.value or 0) * 0.7) for item in run.locals)
    result = judge(dataclasses.replace(run, locals=slow), history=past_of(judge(run)))
    assert {fault.code for fault in result.findings} == {"below-floor"}
    figure = result.check("gemm").figures[0]  # type: ignore[union-attr]
    assert (figure.basis, figure.expected) == ("floor", 730.9)
    assert "MAMF" in str(figure.source)


def test_all_gpus_below_the_floor_is_one_finding_and_no_single_nodes_fault() -> None:
    run = gpu_run()
    slow = tuple(dataclasses.replace(item, value=float(item.value or 0) * 0.7) for item in run.locals)
    result = judge(dataclasses.replace(run, locals=slow))
    assert [finding.check for finding in result.findings] == ["gemm", "hbm"]
    assert "all 16 ranks is below the floor 730.9 TFLOPS (proposal)" in result.headline
    assert (result.verdict, result.bad_nodes, result.healthy_nodes) == ("FAIL", (), ())


def test_one_gpu_below_the_floor_is_named() -> None:
    run = gpu_run()
    slow = tuple(
        dataclasses.replace(item, value=600.0) if (item.rank, item.what) == (3, "gemm_bf16") else item
        for item in run.locals
    )
    result = judge(dataclasses.replace(run, locals=slow))
    assert [(fault.code, fault.ranks) for fault in result.findings] == [("below-floor", (3,))]
    assert result.bad_nodes == ("host-0",)


def test_storage_that_is_written_and_read_passes_however_fast_it_is() -> None:
    disks = tuple(Local(rank=rank, what="storage_write", value=0.1 + rank, unit="GB/s") for rank in range(16))
    result = judge(gpu_run(locals=(*gpu_run().locals, *disks)))
    assert verdict_of(result, "storage") == "PASS"
    broken = Local(rank=3, what="storage_read", value=None, unit="GB/s", error="No space left on device")
    result = judge(gpu_run(locals=(*gpu_run().locals, *disks, broken)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("storage-failed", ())]


def test_a_figure_that_could_not_be_measured_is_a_failure_of_its_node() -> None:
    run = gpu_run()
    broken = Local(rank=4, what="gemm_bf16", value=None, unit="TFLOPS", error="CUDA error: an illegal access")
    result = judge(dataclasses.replace(run, locals=(*run.locals, broken)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("local-failed", ("host-0",))]
