"""What NVML tells of a GPU, as the judge understands it."""

from __future__ import annotations

import uuid

import pynvml
import pytest

from checklist.judges.gpus import NORMAL_THROTTLING
from checklist.probes import gpus
from tests.checklist import runs


def test_the_judge_calls_throttling_what_the_probe_calls_it() -> None:
    assert set(NORMAL_THROTTLING) <= set(gpus._THROTTLES.values())
    assert set(runs.healthy_gpu(0, 8, "after").throttle_reasons or ()) <= set(gpus._THROTTLES.values())


@pytest.mark.parametrize(
    ("state", "status", "cluster", "domain"),
    [
        (3, 0, "5c9e8a10-0000-4000-8000-00000000beef", "5c9e8a10-0000-4000-8000-00000000beef.32766"),
        (3, 0, "00000000-0000-0000-0000-000000000000", None),  # an HGX board: within one host
        (2, 0, "5c9e8a10-0000-4000-8000-00000000beef", None),  # in progress
        (3, 999, "5c9e8a10-0000-4000-8000-00000000beef", None),  # the registration failed
    ],
)
def test_an_nvlink_domain_is_a_cluster_and_a_clique_that_is_registered(
    state: int, status: int, cluster: str, domain: str | None
) -> None:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.state, info.status, info.cliqueId = state, status, 32766
    info.clusterUuid = (type(info.clusterUuid))(*uuid.UUID(cluster).bytes)
    assert gpus.domain_of(info) == domain
