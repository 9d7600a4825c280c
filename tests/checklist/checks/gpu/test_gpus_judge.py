"""Judging of participating GPUs and their health."""

from __future__ import annotations

import dataclasses

import pytest

from checklist.checks.gpu.gpus_judge import CORRECTED_ERRORS
from checklist.measurements import Measurements
from checklist.verdict import judge
from tests.checklist.runs import (
    all_with,
    codes,
    gpu_run,
    healthy_gpu,
    verdict_of,
    with_facts,
    with_health,
    with_states,
)

FAULTS: list[tuple[str, Measurements, str, str]] = [
    ("one GPU twice", with_facts(gpu_run(2, 1), 1, gpu_uuids=("GPU-0-0",)), "gpu-shared", "FAIL"),
    ("7 of 8 GPUs", with_facts(gpu_run(), 8, gpu_uuids=("u",) * 7), "gpu-count", "FAIL"),
    ("a busy GPU", with_facts(gpu_run(), 3, gpu_processes=1), "gpu-busy", "WARN"),
    ("an NVLink down", with_health(gpu_run(), 9, nvlinks_active=17), "nvlink-down", "FAIL"),
    ("a narrow slot", with_health(gpu_run(), 9, pcie_width=8), "pcie-narrow", "WARN"),
    ("lanes lost", with_health(gpu_run(), 9, pcie_width=8, pcie_width_most=16), "pcie-narrow", "FAIL"),
]  # fmt: skip


@pytest.mark.parametrize(("description", "run", "code", "level"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_each_fault_of_a_gpu_is_reported_with_its_code(
    description: str, run: Measurements, code: str, level: str
) -> None:
    assert codes(run) == ({code: level} if code else {})


def test_lanes_missing_on_all_gpus_of_a_model_count_as_intended() -> None:
    narrow = {"pcie_width": 8, "pcie_width_most": 16}
    run = gpu_run()
    everywhere = tuple(dataclasses.replace(state, **narrow) for state in run.health)  # type: ignore[arg-type]
    assert codes(dataclasses.replace(run, health=everywhere)) == {}
    one = gpu_run(1, 1)
    health = tuple(dataclasses.replace(state, **narrow) for state in one.health)  # type: ignore[arg-type]
    assert codes(dataclasses.replace(one, health=health))["pcie-narrow"] == "WARN"


def test_faulty_gpus_are_named_with_their_node() -> None:
    run = gpu_run()
    for changes, code in (
        ({"ecc_uncorrected": 2}, "ecc"),
        ({"ecc_corrected": CORRECTED_ERRORS + 1}, "ecc-corrected"),
        ({"remap_exhausted_banks": 1}, "remap-exhausted"),
        ({"remap_failed": True}, "remap-failed"),
        ({"remap_pending": True}, "remap-pending"),
        ({"xids": (79,)}, "xid-reboot"),
        ({"xids": (31, 48)}, "xid-reset"),
        ({"xids": (54,)}, "xid-isolate"),
        ({"xids": (31,)}, "xid-monitor"),
        ({"xids": (9999,)}, "xid-monitor"),
        ({"xids_earlier": (13, 119)}, "xid-earlier"),
        ({"recovery_action": "GPU reset"}, "recovery"),
        ({"throttle_reasons": ("hardware thermal slowdown",)}, "throttled"),
    ):
        ill = dataclasses.replace(healthy_gpu(9, 8, "after"), **changes)
        result = judge(dataclasses.replace(run, health=(*run.health, ill)))
        assert [(fault.code, fault.nodes, fault.ranks) for fault in result.findings] == [
            (code, ("host-1",), (9,))
        ]


@pytest.mark.parametrize(("mib", "short"), [(73_404, False), (73_403, True)])
def test_less_memory_than_the_peers_or_than_the_data_sheet_gives_a_warning(mib: int, short: bool) -> None:
    full = with_states(gpu_run(), range(16), "after", memory_mib=81_559)  # an H100's
    one, every = (with_states(full, ranks, "after", memory_mib=mib) for ranks in ([9], range(16)))
    for run, nodes in ((one, ("host-1",)), (every, ())):
        faults = [(fault.code, fault.verdict, fault.nodes) for fault in judge(run).findings]
        assert faults == [("memory-short", "WARN", nodes)] * short


def test_a_few_corrected_errors_and_remapped_rows_give_no_finding() -> None:
    fine = {"ecc_corrected": CORRECTED_ERRORS, "remap_exhausted_banks": 0}
    assert codes(with_health(gpu_run(), 9, **fine)) == {}


@pytest.mark.parametrize(
    ("total", "growth", "days", "reported"),
    [
        (CORRECTED_ERRORS, 0, None, False),
        (CORRECTED_ERRORS + 1, 0, None, True),
        (4 * CORRECTED_ERRORS, 0, 30, False),
        (CORRECTED_ERRORS, 4_900, 30, False),
        (CORRECTED_ERRORS, 5_000, 30, True),
    ],
)
def test_corrected_errors_are_judged_per_time_since_boot_and_under_load(
    total: int, growth: int, days: int | None, reported: bool
) -> None:
    run = gpu_run(2)
    run = with_states(run, [9], "before", ecc_corrected=total)
    run = with_states(run, [9], "after", ecc_corrected=total + growth)
    run = all_with(run, uptime_s=None if days is None else days * 86_400.0)
    assert codes(run) == ({"ecc-corrected": "WARN"} if reported else {})


def test_application_xids_from_before_the_run_give_no_finding() -> None:
    run = gpu_run()
    reported = tuple(dataclasses.replace(state, xids_earlier=(13, 31, 43)) for state in run.health)
    assert codes(dataclasses.replace(run, health=reported)) == {}


def test_unreadable_xids_are_not_a_pass() -> None:
    run = gpu_run()
    blind = tuple(dataclasses.replace(state, xids=None) for state in run.health)
    result = judge(dataclasses.replace(run, health=blind))
    assert verdict_of(result, "gpu-health") == "NO-VERDICT"
    assert result.verdict == "PASS"
    assert "Not judged: gpu-health" in result.headline


def test_unreported_memory_errors_are_not_a_pass() -> None:
    silent = with_states(gpu_run(), [3], "after", ecc_uncorrected=None, remap_failed=None)
    assert verdict_of(judge(silent), "gpu-health") == "NO-VERDICT"
    without_ecc = with_states(gpu_run(), [3], "after", ecc_uncorrected=None)
    assert verdict_of(judge(without_ecc), "gpu-health") == "PASS"
