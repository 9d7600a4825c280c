"""GPUs that a published training run was measured on, or one like them: what a first plan rests on."""

from __future__ import annotations

from collections.abc import Callable

from estimator import hardware
from estimator.hardware import Gpu
from estimator.throughput.efficiency import published

UNMEASURED = "not measured: no training run on this GPU, or on its architecture with such links, is published"


def unmeasured_rule() -> Callable[[Gpu], bool]:
    """Predicate on GPUs without a measured run of their own, or of their architecture with such links.

    For the catalogue in use; links are NVLink or PCIe.
    """
    table = published().table
    measured = {_kind(gpu) for gpu in hardware.gpus() if ("runs", gpu.name) in table}
    return lambda gpu: ("runs", gpu.name) not in table and _kind(gpu) not in measured


def _kind(gpu: Gpu) -> tuple[str | None, bool]:
    return gpu.architecture, gpu.interconnect.startswith("NVLink")
