"""Identity, health and other users of the GPUs, from NVML. Empty without GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from checklist.checks.gpu import nvlink_probe, xids_probe
from checklist.checks.gpu.nvml import fields, optional, queries, session, throttle_reasons
from checklist.measurements import GpuHealth, to_dict
from checklist.probing.context import Context
from estimator.hardware.visible_gpus import visible_handles

_RECOVERIES = {  # nvml.h, nvmlDeviceGpuRecoveryAction_t
    0: "none",
    1: "GPU reset",
    2: "node reboot",
    3: "drain peer-to-peer",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpus:
    """GPUs available to this process, in CUDA's order."""

    uuids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    driver: str | None = None
    nvlink_domain: str | None = None
    """NVLink domain of the first GPU, shared by all GPUs of a host."""
    busy: dict[str, int] | None = None
    """Number of processes on each GPU, by UUID."""


def list_gpus() -> VisibleGpus:
    """List all visible GPUs; empty without a driver."""
    with session() as nvml:
        if nvml is None:
            return VisibleGpus()
        handles = visible_handles(nvml)
        uuids = tuple(nvml.nvmlDeviceGetUUID(handle) for handle in handles)
        running = nvml.nvmlDeviceGetComputeRunningProcesses  # this package has not started any
        counts = [len(optional(partial(running, handle), nvml) or ()) for handle in handles]
        return VisibleGpus(
            uuids=uuids,
            names=tuple(nvml.nvmlDeviceGetName(handle) for handle in handles),
            driver=nvml.nvmlSystemGetDriverVersion(),
            nvlink_domain=nvlink_probe.domain(nvml, handles[0]) if handles else None,
            busy={name: count for name, count in zip(uuids, counts, strict=True) if count},
        )


def health(context: Context, when: str) -> list[dict[str, Any]]:
    """Read GpuHealth of this rank's GPU, plus its record under load if there is one; empty without a GPU."""
    with session() as nvml:
        handles = visible_handles(nvml) if nvml is not None else []
        if nvml is None or context.local_rank >= len(handles):
            return []
        handle = handles[context.local_rank]
        pci = optional(lambda: nvml.nvmlDeviceGetPciInfo(handle), nvml)
        address = None if pci is None else pci.busId
        xids = xids_probe.read_xids(context, when, address, nvml, handle)
        current = replace(_health(nvml, handle, context.rank, when), **xids)
        loaded = context.stored.pop("loaded", None)  # by load_probe.watched
        return [to_dict(state) for state in (loaded, current) if state is not None]


def _health(nvml: Any, handle: Any, rank: int, when: Any) -> GpuHealth:
    query = queries(nvml, handle)
    remapped = query("nvmlDeviceGetRemappedRows")
    spare_rows = query("nvmlDeviceGetRowRemapperHistogram")
    memory, power = query("nvmlDeviceGetMemoryInfo"), query("nvmlDeviceGetPowerUsage")
    volatile = nvml.NVML_VOLATILE_ECC
    return GpuHealth(
        rank=rank,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        when=when,
        ecc_uncorrected=query(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
        ),
        ecc_corrected=query("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
        memory_mib=None if memory is None else memory.total >> 20,
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        remap_exhausted_banks=None if spare_rows is None else spare_rows.none,
        throttle_reasons=throttle_reasons(nvml, handle),
        temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        sm_clock_mhz=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        pcie_generation=query("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width=query("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_most=query("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_replays=query("nvmlDeviceGetPcieReplayCounter"),
        **nvlink_probe.links(nvml, handle),
        **nvlink_probe.fabric(nvml, handle),
        recovery_action=_recovery(nvml, handle),
    )


def _recovery(nvml: Any, handle: Any) -> str | None:
    """Return the recovery action requested by the driver (r560 or newer); None if not reported."""

    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    number = None if field is None else fields(nvml, handle, [field])[0]
    return None if number is None else _RECOVERIES.get(number, f"action {number}")
