"""NVLinks and the fabric as read from NVML."""

from __future__ import annotations

import pytest

from checklist.checks.gpu import nvlink_probe
from tests.checklist.checks.gpu.nvml import Gpu, Nvml, fabric

RACK = "5c9e8a10-0000-4000-8000-00000000beef"
STATE = "nvmlDeviceGetNvLinkState"
FABRIC = "nvmlDeviceGetGpuFabricInfoV"


def hopper(**changes: int) -> Gpu:
    """An H100 of an HGX board: 18 links at 26,562 MB/s, errors by link."""
    gpu = Gpu(**{STATE: dict.fromkeys(range(18), 1), FABRIC: fabric(3)})
    gpu.field("NVML_FI_DEV_NVLINK_GET_SPEED", 26562, links=18)
    for kind in ("REPLAY", "RECOVERY", "CRC"):
        gpu.field(f"NVML_FI_DEV_NVLINK_ERROR_DL_{kind}", changes.get(kind, 0), links=18)
    return gpu


def test_hopper_reports_speeds_and_errors_of_each_link() -> None:
    gpu = hopper(REPLAY=1)
    gpu.answers[STATE] = {**dict.fromkeys(range(18), 1), 7: 0}
    gpu.field("NVML_FI_DEV_NVLINK_GET_SPEED", 13281)  # of link 0
    assert nvlink_probe.links(Nvml(gpu), gpu) == {
        "nvlinks_active": 17,
        "nvlink_mbytes_per_s": 13281,
        "nvlink_errors": {"replay": 17, "recovery": 0, "CRC": 0},
    }


def test_gpus_before_hopper_report_sums_over_all_links() -> None:
    gpu = Gpu(**{STATE: dict.fromkeys(range(12), 1)})
    gpu.field("NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 3)
    gpu.field("NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", 2)
    gpu.field("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 1)
    assert nvlink_probe.links(Nvml(gpu), gpu) == {
        "nvlinks_active": 12,
        "nvlink_mbytes_per_s": None,
        "nvlink_errors": {"replay": 1, "CRC": 5},
    }


def test_blackwell_reports_link_recoveries() -> None:
    gpu = Gpu(**{STATE: dict.fromkeys(range(18), 1)})
    gpu.field("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS", 0, links=18)
    gpu.field("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS", 1, links=2)
    assert nvlink_probe.links(Nvml(gpu), gpu)["nvlink_errors"] == {"failed recovery": 0, "link recovery": 2}


def test_a_gpu_without_links_or_fabric_reports_neither() -> None:
    gpu = Gpu()
    assert (nvlink_probe.links(Nvml(gpu), gpu), nvlink_probe.fabric(Nvml(gpu), gpu)) == ({}, {})
    without = Gpu(**{FABRIC: fabric(0)})
    assert nvlink_probe.fabric(Nvml(without), without) == {}


@pytest.mark.parametrize(
    ("state", "status", "mask", "expected", "faults"),
    [
        (3, 0, 0b10101010, "completed", ()),
        (3, 0, 0b10101001, "completed", ("bandwidth degraded",)),
        (3, 0, 0b10010110, "completed", ("route recovery", "route unhealthy")),
        (2, 0, 0, "in progress", ()),
        (1, 999, 0, "not started", ()),
        (3, 999, 0, "failed with status 999", ()),
    ],
)
def test_the_state_and_faults_of_the_fabric_are_reported_as_text(
    state: int, status: int, mask: int, expected: str, faults: tuple[str, ...]
) -> None:
    gpu = Gpu(**{FABRIC: fabric(state, status, mask=mask)})
    reported = nvlink_probe.fabric(Nvml(gpu), gpu)
    assert (reported["fabric"], reported["fabric_faults"]) == (expected, faults)


@pytest.mark.parametrize(
    ("state", "status", "cluster", "domain"),
    [
        (3, 0, RACK, f"{RACK}.32766"),
        (3, 0, "00000000-0000-0000-0000-000000000000", None),  # an HGX board: within one host
        (2, 0, RACK, None),  # in progress
        (3, 999, RACK, None),  # the registration failed
    ],
)
def test_an_nvlink_domain_consists_of_cluster_and_clique_and_needs_registration(
    state: int, status: int, cluster: str, domain: str | None
) -> None:
    gpu = Gpu(**{FABRIC: fabric(state, status, cluster, 32766)})
    assert nvlink_probe.domain(Nvml(gpu), gpu) == domain
