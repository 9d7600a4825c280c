"""What NVML says of the GPUs: who they are, how they are, and who else uses them. Nothing without GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from checklist.measurements import GpuHealth, to_dict
from checklist.probes import xids
from checklist.probes.context import Context
from estimator.hardware.visible_gpus import VARIABLE, whole_gpus

T = TypeVar("T")
_THROTTLES = {  # nvml.h, nvmlClocksEventReason*; idle (0x1) and application clocks (0x2) are nobody's fault
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
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
_REGISTERED = 3  # nvml.h, NVML_GPU_FABRIC_STATE_COMPLETED
_NVLINKS = 18  # the most that a GPU has (H100); those that are not there raise an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The GPUs that this process may use, in CUDA's order."""

    uuids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    driver: str | None = None
    nvlink_domain: str | None = None
    """Of the first GPU; the others of a host are in the same."""
    busy: dict[str, int] | None = None
    """Processes on each GPU, by UUID."""


def look() -> Seen:
    """All visible GPUs; empty where there is no driver."""
    with _nvml() as nvml:
        if nvml is None:
            return Seen()
        handles = _visible(nvml)
        uuids = tuple(_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles)
        return Seen(
            uuids=uuids,
            names=tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in handles),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            nvlink_domain=_fabric(nvml, handles[0]) if handles else None,
            busy={
                name: count
                for name, handle in zip(uuids, handles, strict=True)
                if (count := _others(nvml, handle))
            },
        )


def health(context: Context, when: str) -> dict[str, Any] | None:
    """The health of this rank's GPU, as GpuHealth; None where it has none."""
    with _nvml() as nvml:
        handles = _visible(nvml) if nvml is not None else []
        if nvml is None or context.local_rank >= len(handles):
            return None
        handle = handles[context.local_rank]
        place = _optional(lambda: nvml.nvmlDeviceGetPciInfo(handle), nvml)
        address = None if place is None else _text(place.busId)
        seen = xids.look(context, when, address, nvml, handle)
        return to_dict(replace(_health(nvml, handle, context.rank, when), **seen))


def _health(nvml: Any, handle: Any, rank: int, when: Any) -> GpuHealth:
    def ask(name: str, *arguments: Any) -> Any:
        return _optional(lambda: getattr(nvml, name)(handle, *arguments), nvml)

    remapped = ask("nvmlDeviceGetRemappedRows")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    power = ask("nvmlDeviceGetPowerUsage")
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_NVLINKS)]
    volatile = nvml.NVML_VOLATILE_ECC
    return GpuHealth(
        rank=rank,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        when=when,
        ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
        ecc_corrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        throttle_reasons=None
        if reasons is None
        else tuple(name for bit, name in _THROTTLES.items() if reasons & bit),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        nvlinks_active=None
        if all(link is None for link in links)
        else sum(link == nvml.NVML_FEATURE_ENABLED for link in links),
        recovery_action=_recovery(nvml, handle),
    )


def _recovery(nvml: Any, handle: Any) -> str | None:
    """What the driver asks for, since r560; None where it doesn't say."""

    def ask() -> Any:
        return nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]

    answer = _optional(ask, nvml)
    if answer is None or answer.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    number = int(answer.value.uiVal)
    return _RECOVERIES.get(number, f"action {number}")


def _fabric(nvml: Any, handle: Any) -> str | None:
    """The NVLink domain that spans hosts, since r535; None where the GPU is in none."""

    def ask() -> Any:
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return info

    info = _optional(ask, nvml)
    return None if info is None else domain_of(info)


def domain_of(info: Any) -> str | None:
    """Cluster and clique as NVML's nvmlGpuFabricInfo tells them; None: not registered, or within one host.

    GPUs of an HGX board are registered too, with a cluster of zeros.
    """
    cluster = bytes(info.clusterUuid)
    if info.state != _REGISTERED or info.status != 0 or not any(cluster):
        return None
    return f"{uuid.UUID(bytes=cluster)}.{info.cliqueId}"


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, or one that doesn't answer: then there are no GPUs for us
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    """Handles in the order that CUDA gives them in this process."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [handles[place] for place in whole_gpus(os.environ.get(VARIABLE), uuids)]


def _others(nvml: Any, handle: Any) -> int:
    """Processes that compute on that GPU. None of ours does yet when this is asked."""
    return len(_optional(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), nvml) or ())


def _optional(ask: Callable[[], T], nvml: Any) -> T | None:
    """What is asked for, or None where this GPU, driver or library doesn't offer it."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
