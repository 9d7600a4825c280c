"""GPUs with a published measurement of a training run, of the same model or a similar one."""

from __future__ import annotations

from collections.abc import Callable

from estimator import hardware
from estimator.hardware import Gpu
from estimator.throughput.efficiency import published

UNMEASURED = "not measured: no published training run on this GPU, or its architecture with the same links"


def unmeasured_rule() -> Callable[[Gpu], bool]:
    """Return a predicate for GPUs without a measured run, of the same model or architecture and links.

    For the active catalogue; links are NVLink or PCIe.
    """
    table = published().table
    measured = {_kind(gpu) for gpu in hardware.gpus() if ("runs", gpu.name) in table}
    return lambda gpu: ("runs", gpu.name) not in table and _kind(gpu) not in measured


def _kind(gpu: Gpu) -> tuple[str | None, bool]:
    return gpu.architecture, gpu.interconnect.startswith("NVLink")
