"""State of a GPU's NVLinks and of its registration with the fabric manager (NVSwitch), from NVML."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from checklist.checks.gpu.nvml import fields, optional

_LINKS = 18  # maximum per GPU (H100 to B200); querying a missing link raises an error
_STATES = {1: "not started", 2: "in progress", 3: "completed"}  # nvml.h, NVML_GPU_FABRIC_STATE_*; 0: none
_FAULTS = {  # nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_*; two bits each, 1 means true
    0: "bandwidth degraded",
    2: "route recovery",
    4: "route unhealthy",
    6: "access timeout recovery",
}
_YES = 1
# Counters per link, up to Hopper and from Blackwell on; before Hopper only sums over all links exist.
_OF_LINKS = {
    "replay": ("NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",),
    "recovery": ("NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",),
    "CRC": ("NVML_FI_DEV_NVLINK_ERROR_DL_CRC",),
    "failed recovery": ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",),
    "link recovery": ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",),
}
_OF_ALL = {
    "replay": ("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",),
    "recovery": ("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",),
    "CRC": (
        "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    ),
}


def links(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the NVLink fields of GpuHealth; all None without links."""

    def state(number: int) -> Any:
        return optional(lambda: nvml.nvmlDeviceGetNvLinkState(handle, number), nvml)

    states = [state(number) for number in range(_LINKS)]
    present = [number for number, state in enumerate(states) if state is not None]
    if not present:
        return {}
    active = [number for number in present if states[number] == nvml.NVML_FEATURE_ENABLED]
    speed = getattr(nvml, "NVML_FI_DEV_NVLINK_GET_SPEED", None)
    requested = [] if speed is None else [(speed, number) for number in active]
    speeds = [value for value in fields(nvml, handle, requested) if value] if requested else []
    return {
        "nvlinks_active": len(active),
        "nvlink_mbytes_per_s": min(speeds, default=None),
        "nvlink_errors": _errors(nvml, handle, active),
    }


def _errors(nvml: Any, handle: Any, active: list[int]) -> dict[str, int] | None:
    """Return errors of all active links since the driver was loaded, by kind; None without counters."""
    totals: dict[str, int] = {}
    for table, scopes in ((_OF_LINKS, active), (_OF_ALL, [0])):
        for kind, names in table.items():
            numbers = [getattr(nvml, name) for name in names if hasattr(nvml, name)]
            requested = [(number, scope) for number in numbers for scope in scopes]
            values = (
                [value for value in fields(nvml, handle, requested) if value is not None] if requested else []
            )
            if values:
                totals.setdefault(kind, sum(values))
    return totals or None


def fabric(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the fabric fields of GpuHealth; empty without a fabric, e.g. without NVSwitches."""
    info = _info(nvml, handle)
    if info is None or info.state not in _STATES:
        return {}
    completed = info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    failed = completed and info.status != nvml.NVML_SUCCESS  # only meaningful in this state
    cluster = uuid.UUID(bytes=bytes(info.clusterUuid))
    return {
        "fabric": f"failed with status {info.status}" if failed else _STATES[info.state],
        "fabric_faults": tuple(
            fault for shift, fault in _FAULTS.items() if info.healthMask >> shift & 0b11 == _YES
        ),
        "fabric_clique": f"{cluster}.{info.cliqueId}" if completed and not failed else None,
    }


def domain(nvml: Any, handle: Any) -> str | None:
    """Return the GPU's NVLink domain across hosts (driver r535 or newer); None without one."""
    clique = fabric(nvml, handle).get("fabric_clique")
    return None if clique is None else across_hosts(clique)


def across_hosts(clique: str) -> str | None:
    """Return the clique if it spans hosts. GPUs of an HGX board are registered too, with zeros."""
    return clique if any(uuid.UUID(clique.rpartition(".")[0]).bytes) else None


def _info(nvml: Any, handle: Any) -> Any:
    def query() -> Any:
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return info

    return optional(query, nvml)
