"""Judging of NVLinks and the fabric: the faulty GPU is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Measurements
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, verdict_of, with_states

BOARD = "00000000-0000-0000-0000-000000000000"
RACK = "5c9e8a10-0000-4000-8000-00000000beef"
HEALTHY: dict[str, Any] = {
    "nvlinks_active": 18,
    "nvlink_mbytes_per_s": 26562,
    "nvlink_errors": {"replay": 4, "recovery": 0, "CRC": 900},
    "fabric": "completed",
    "fabric_clique": f"{BOARD}.0",
}


def run_with(*ranks: int, nodes: int = 2, **changes: Any) -> Measurements:
    """Healthy GPUs of HGX boards, except for the given values after the load."""
    run = gpu_run(nodes)
    health = tuple(dataclasses.replace(state, **HEALTHY) for state in run.health)
    return with_states(dataclasses.replace(run, health=health), ranks, "after", **changes)


def errors(**grown: int) -> dict[str, int]:
    return {kind: number + grown.get(kind, 0) for kind, number in HEALTHY["nvlink_errors"].items()}


def test_healthy_nvlinks_give_no_finding() -> None:
    result = judge(run_with())
    assert (result.findings, verdict_of(result, "gpu-health")) == ((), "PASS")


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"nvlinks_active": 17}, ("nvlink-down", "FAIL")),
        ({"nvlink_mbytes_per_s": 13281}, ("nvlink-slow", "FAIL")),
        ({"nvlink_errors": errors(replay=1)}, ("nvlink-errors", "FAIL")),
        ({"nvlink_errors": errors(recovery=1)}, ("nvlink-errors", "FAIL")),
        ({"nvlink_errors": errors(CRC=3)}, ("nvlink-errors", "WARN")),
        # in two seconds
        ({"fabric": "in progress", "fabric_clique": None}, ("fabric-state", "FAIL")),
        ({"fabric_faults": ("bandwidth degraded",)}, ("fabric-state", "FAIL")),
        ({"fabric_faults": ("route recovery",)}, ("fabric-state", "WARN")),
    ],
)
def test_a_gpu_with_faulty_nvlinks_or_fabric_is_named(
    changes: dict[str, Any], reported: tuple[str, str]
) -> None:
    result = judge(run_with(9, **changes))
    (fault,) = result.findings
    assert (fault.code, fault.verdict) == reported
    assert (fault.nodes, fault.ranks, fault.gpus) == (("host-1",), (9,), ("GPU-1-1",))


@pytest.mark.parametrize(
    ("links", "reported"), [({"nvlinks_active": 17}, 1), ({"nvlink_mbytes_per_s": 25_400}, 0), ({}, 0)]
)
def test_nvlinks_missing_on_all_gpus_are_compared_with_the_data_sheet(
    links: dict[str, int], reported: int
) -> None:
    run = run_with()
    everywhere = tuple(dataclasses.replace(state, **links) for state in run.health)  # type: ignore[arg-type]
    findings = judge(dataclasses.replace(run, health=everywhere)).findings
    assert [(fault.code, fault.verdict, fault.nodes) for fault in findings] == [
        ("nvlink-below-product", "WARN", ())
    ] * reported


def test_a_single_gpu_of_a_shared_machine_needs_no_fabric() -> None:
    run = gpu_run(2, 1)
    reported = tuple(dataclasses.replace(state, fabric="in progress") for state in run.health)
    nvlink_faults = [
        fault
        for fault in judge(dataclasses.replace(run, health=reported)).findings
        if fault.check == "gpu-health"
    ]
    assert {(fault.code, fault.verdict) for fault in nvlink_faults} == {("fabric-state", "WARN")}


def test_a_reset_counter_is_ignored() -> None:
    assert judge(run_with(9, nvlink_errors={"replay": 0, "recovery": 0, "CRC": 0})).findings == ()


def test_nvlink_cliques_are_reported_and_boards_are_not_merged_into_a_rack() -> None:
    (fault,) = judge(run_with(9, fabric_clique=f"{BOARD}.1")).findings
    assert (fault.code, fault.verdict, fault.suspects) == ("fabric-cliques", "WARN", ("host-1",))
    rack = run_with(*range(16), fabric_clique=f"{RACK}.1")
    assert judge(rack).findings == ()
    (fault,) = judge(with_states(rack, range(8, 16), "after", fabric_clique=f"{RACK}.2")).findings
    assert (fault.code, fault.suspects) == ("fabric-cliques", ("host-0", "host-1"))
    assert "8 GPUs of host-0; 8 GPUs of host-1" in fault.title
