"""Names of NVML values shared by probe and judge."""

from __future__ import annotations

from checklist.checks.gpu.gpus_judge import NORMAL_THROTTLING
from checklist.checks.gpu.nvml import THROTTLES
from tests.checklist import runs


def test_the_judge_and_the_probe_use_the_same_names_of_throttling_reasons() -> None:
    assert set(NORMAL_THROTTLING) <= set(THROTTLES.values())
    assert set(runs.healthy_gpu(0, 8, "after").throttle_reasons or ()) <= set(THROTTLES.values())
