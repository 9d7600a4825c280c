"""Hosts with differing settings: compared with a reference or with the majority of their kind."""

from __future__ import annotations

import pytest

from checklist.measurements import COMMAND_LINE, Measurements
from checklist.reference import Reference
from checklist.result import Finding, Result
from checklist.verdict import judge
from tests.checklist.runs import SETTINGS, all_with, codes, cpu_run, gpu_run, verdict_of, with_facts

RIGHT: Reference = {"p5.48xlarge": dict(SETTINGS)}


def with_settings(run: Measurements, rank: int, **changes: str | None) -> Measurements:
    """Return the run with settings of one host changed; None removes one. Spaces are written as _."""
    reported = SETTINGS | {name.replace("_", " "): value for name, value in changes.items()}
    return with_facts(
        run, rank, settings={name: value for name, value in reported.items() if value is not None}
    )


def with_sysctl(run: Measurements, rank: int, value: str) -> Measurements:
    return with_facts(run, rank, settings={**SETTINGS, "net.core.rmem_max": value})


def only(result: Result) -> Finding:
    (fault,) = (finding for finding in result.findings if finding.check == "host-settings")
    return fault


def reason(result: Result) -> str:
    check = result.check("host-settings")
    return check.reason


def test_a_differing_node_gives_a_warning_with_the_expected_value() -> None:
    fault = only(judge(with_sysctl(gpu_run(4), 16, "212992")))
    assert fault.title == (
        "The settings of host-2 are not those of most nodes like it: net.core.rmem_max 212992 instead of "
        "16777216."
    )
    assert (fault.verdict, fault.suspects, fault.nodes) == ("WARN", ("host-2",), ())


def test_nodes_with_the_same_differing_settings_give_one_finding() -> None:
    run = gpu_run(8)
    for rank in (8, 16):
        run = with_settings(run, rank, CPU_governor="powersave")
    assert only(judge(run)).suspects == ("host-1", "host-2")


def test_a_kernel_parameter_set_on_only_some_nodes_is_a_difference() -> None:
    without = with_settings(gpu_run(4), 8, kernel_parameter_iommu=None)
    assert "kernel parameter iommu not set instead of pt" in only(judge(without)).title


def test_unreadable_settings_are_not_compared() -> None:
    hidden = with_settings(
        gpu_run(4), 8, CPU_governor=None, kernel_parameter_iommu=None, kernel_parameters=None
    )
    assert codes(hidden) == {}
    assert COMMAND_LINE not in hidden.facts[8].settings


def test_two_differing_nodes_have_no_majority() -> None:
    result = judge(with_sysctl(gpu_run(2), 8, "212992"))
    assert verdict_of(result, "host-settings") == "NO-VERDICT"
    assert "net.core.rmem_max" in reason(result)
    assert "--reference-node" in reason(result)
    assert (result.verdict, result.findings) == ("PASS", ())


def test_host_specific_values_have_no_majority_and_name_no_node() -> None:
    run = gpu_run(4)
    for node in range(4):
        run = with_sysctl(run, 8 * node, str(node))
    assert codes(run) == {}


@pytest.mark.parametrize("kind", [None, "p5.48xlarge"])
def test_nodes_are_grouped_by_machine_type_or_else_by_gpus_and_processor(kind: str | None) -> None:
    other = with_settings(
        all_with(gpu_run(4), instance_type=kind), 0, cpu="AMD EPYC", CPU_governor="powersave"
    )
    result = judge(other)
    assert verdict_of(result, "host-settings") == ("WARN" if kind else "PASS")


def test_a_differing_kernel_release_is_reported_by_the_versions_check_only() -> None:
    assert codes(with_settings(gpu_run(4), 8, kernel_release="5.10")) == {}


def test_one_of_two_nodes_can_be_the_reference() -> None:
    run = with_sysctl(gpu_run(2), 8, "212992")
    fault = only(judge(run, reference_node="host-1"))
    assert fault.title == (
        "The settings of host-0 are not those of host-1: net.core.rmem_max 16777216 instead of 212992."
    )
    assert fault.nodes == ("host-0",)


def test_a_stored_reference_judges_single_nodes_and_values_equal_everywhere() -> None:
    everywhere = all_with(gpu_run(4), settings={**SETTINGS, "kernel release": "5.10"})
    fault = only(judge(everywhere, reference=RIGHT))
    assert fault.title.startswith(
        "The settings of host-0, host-1, host-2, host-3 are not those of the reference"
    )
    assert "kernel release 5.10 instead of 6.8.0-1021-aws" in fault.title
    alone = with_sysctl(gpu_run(1), 0, "1")
    assert only(judge(alone, reference=RIGHT)).nodes == ("host-0",)


def test_a_reference_of_other_machine_types_gives_no_verdict() -> None:
    result = judge(cpu_run(2), reference=RIGHT)
    assert verdict_of(result, "host-settings") == "NO-VERDICT"
    assert reason(result) == "The reference covers p5.48xlarge only, and this run has no such node."


def test_a_single_host_without_a_reference_is_not_compared() -> None:
    assert verdict_of(judge(gpu_run(1)), "host-settings") == "skipped"
