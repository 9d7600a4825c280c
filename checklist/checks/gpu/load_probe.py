"""State of a GPU under load from NVML: clocks, power, temperature and PCIe link.

The idle state is not informative: clocks are low, and the PCIe link drops to an older generation to save
power (``nvidia-smi --help-query-gpu``: pcie.link.gen.current).
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checklist.checks.gpu.nvml import optional, queries, session, throttle_reasons
from checklist.measurements import GpuHealth
from checklist.probing.context import Context
from estimator.hardware.visible_gpus import visible_handles

_EVERY_S = 0.2
_FEWEST = 3  # minimum number of samples; the shortest load has ten
_OFTEN = 0.1  # minimum share of the samples; shorter throttling has no noticeable effect
_LEAVE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """NVML's values at one moment."""

    sm_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    margin_c: float | None = None
    """Degrees below the slowdown temperature; newer GPUs report this instead of the limit."""
    reasons: tuple[str, ...] | None = None
    """Throttling reasons."""
    pcie_generation: int | None = None
    memory_clock_mhz: int | None = None


@contextlib.contextmanager
def watched(context: Context) -> Iterator[None]:
    """Sample this rank's GPU during the block and keep its GpuHealth for the next command "health"."""
    stop, samples = threading.Event(), list[GpuHealth]()
    thread = threading.Thread(
        target=_watch, args=(context, stop, samples), name="checklist-load", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_LEAVE_S)  # a lost GPU may not respond; then there is no result
        context.stored["loaded"] = next(iter(samples), None)


def _watch(context: Context, stop: threading.Event, readings: list[GpuHealth]) -> None:
    with session() as nvml:
        handles = visible_handles(nvml) if nvml is not None else []
        if context.local_rank >= len(handles):
            return
        handle, samples = handles[context.local_rank], list[Sample]()
        while not stop.wait(_EVERY_S):
            samples.append(sample(nvml, handle))
        if len(samples) >= _FEWEST:
            readings.append(health(nvml, handle, context.rank, samples))


def sample(nvml: Any, handle: Any) -> Sample:
    """Read the GPU's current state."""
    query = queries(nvml, handle)
    power = query("nvmlDeviceGetPowerUsage")
    return Sample(
        sm_clock_mhz=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        power_w=None if power is None else power / 1000,
        temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        margin_c=_margin(nvml, handle),
        reasons=throttle_reasons(nvml, handle),
        pcie_generation=query("nvmlDeviceGetCurrPcieLinkGeneration"),
        memory_clock_mhz=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
    )


def health(nvml: Any, handle: Any, rank: int, samples: Sequence[Sample]) -> GpuHealth:
    """Summarize the samples: medians, maximum temperature, and newest PCIe generation."""
    query = queries(nvml, handle)

    def values_of(field: str) -> list[Any]:
        return [value for sample in samples if (value := getattr(sample, field)) is not None]

    clocks, power, temperature = values_of("sm_clock_mhz"), values_of("power_w"), values_of("temperature_c")
    limits = [query("nvmlDeviceGetEnforcedPowerLimit"), query("nvmlDeviceGetPowerManagementDefaultLimit")]
    enforced, default = (None if limit is None else limit / 1000 for limit in limits)
    slowdown = query("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if slowdown is None and temperature and (margins := values_of("margin_c")):
        slowdown = max(temperature) + min(margins)
    return GpuHealth(
        rank=rank,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        when="loaded",
        throttle_reasons=_frequent(values_of("reasons")),
        sm_clock_mhz=round(statistics.median(clocks)) if clocks else None,
        sm_clock_set_mhz=query("nvmlDeviceGetApplicationsClock", nvml.NVML_CLOCK_SM),
        sm_clock_default_mhz=query("nvmlDeviceGetDefaultApplicationsClock", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=max(values_of("memory_clock_mhz"), default=None),
        memory_clock_most_mhz=query("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        power_w=statistics.median(power) if power else None,
        power_limit_w=enforced,
        power_default_w=default,
        temperature_c=max(temperature, default=None),
        slowdown_c=slowdown,
        pcie_generation=max(values_of("pcie_generation"), default=None),
        pcie_generation_gpu=query("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
        pcie_generation_most=query("nvmlDeviceGetMaxPcieLinkGeneration"),
    )


def _frequent(reasons: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return throttling reasons present in enough of the samples."""
    if not reasons:
        return None
    counts = Counter(name for names in reasons for name in names)
    return tuple(name for name, count in counts.items() if count >= _OFTEN * len(reasons))


def _margin(nvml: Any, handle: Any) -> float | None:
    """Read the degrees below the slowdown temperature (driver r560 or newer)."""
    margin = optional(lambda: nvml.nvmlDeviceGetMarginTemperature(handle), nvml)
    return None if margin is None else float(margin)
