"""Findings of the DCGM diagnostic name node and GPU; a missing result is not a pass."""

from __future__ import annotations

import dataclasses
from typing import Any

from checklist.measurements import Diagnosed, DiagnosticFault, Measurements
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, verdict_of

FAULT = DiagnosticFault(
    test="memory", failed=True, gpu="GPU-1-3", text="Row remapping failed.", severities=(2,)
)
CONFIG = DiagnosticFault(test="software", failed=True, text="Persistence mode is off.", severities=(5,))


def deep(*reported: Diagnosed, **changes: Any) -> Measurements:
    return dataclasses.replace(gpu_run(), profile="deep", diagnosed=reported, **changes)


def healthy(node: int, **changes: Any) -> Diagnosed:
    return dataclasses.replace(Diagnosed(node=node, level=2, passed=("memory", "pcie")), **changes)


def test_a_failed_test_is_reported_with_its_gpu() -> None:
    result = judge(deep(healthy(0), healthy(1, faults=(FAULT,))))
    (fault,) = result.findings
    assert (fault.code, fault.verdict, fault.nodes) == ("dcgm", "FAIL", ("host-1",))
    assert (fault.ranks, fault.gpus) == ((11,), ("GPU-1-3",))
    assert fault.title == "DCGM's test memory fails for the GPU of rank 11 (host-1): Row remapping failed."
    assert result.bad_nodes == ("host-1",)


def test_a_failed_test_of_several_gpus_is_one_finding_and_a_configuration_error_no_failure() -> None:
    gpus = tuple(dataclasses.replace(CONFIG, gpu=f"GPU-0-{number}") for number in range(8))
    (fault,) = judge(deep(healthy(0, faults=gpus), healthy(1))).findings
    assert (fault.verdict, fault.ranks) == ("WARN", tuple(range(8)))
    unknown = dataclasses.replace(FAULT, severities=(), failed=False)
    assert [one.verdict for one in judge(deep(healthy(0, faults=(unknown,)), healthy(1))).findings] == [
        "WARN"
    ]


def test_passed_tests_are_counted_and_omitted_tests_named() -> None:
    check = judge(deep(healthy(0, left_out=("nvlink",)), healthy(1))).check("dcgm")
    assert check.verdict == "PASS"
    assert "2 tests passed, left out nvlink." in check.reason


def test_a_diagnosis_without_a_result_is_not_a_pass() -> None:
    result = judge(deep(healthy(0), healthy(1, passed=(), error="the diagnostic was ended after 880 s")))
    check = result.check("dcgm")
    assert check.verdict == "NO-VERDICT"
    assert "host-1: the diagnostic was ended after 880 s" in check.reason
    assert (
        verdict_of(judge(deep(healthy(0, passed=(), left_out=("memory",)), healthy(1))), "dcgm")
        == "NO-VERDICT"
    )
    assert verdict_of(judge(deep()), "dcgm") == "NO-VERDICT", "the phase has left nothing"
    mixed = judge(
        deep(healthy(0, faults=(FAULT,)), healthy(1, installed=False, passed=(), error="not on the path"))
    )
    assert verdict_of(mixed, "dcgm") == "FAIL"


def test_the_dcgm_check_does_not_apply_without_dcgm_or_in_other_profiles() -> None:
    without = [Diagnosed(node=node, level=2, installed=False, error="not there") for node in range(2)]
    for run, why in ((deep(*without), "on no node's path"), (gpu_run(), "Profile standard does not run")):
        result = judge(run)
        (left_out,) = (one for one in result.skipped if one.check == "dcgm")
        assert why in left_out.reason
        assert result.verdict == "PASS"
