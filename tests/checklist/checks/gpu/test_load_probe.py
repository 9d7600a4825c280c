"""Samples of a GPU under load from NVML."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pynvml
import pytest

from checklist.checks.gpu import gpus_probe, load_probe
from checklist.checks.gpu.load_probe import Sample, health, sample
from checklist.measurements import GpuHealth, record
from checklist.probing.context import Context
from tests.checklist.checks.gpu.nvml import Gpu, Nvml

H100: dict[str, Any] = {
    "nvmlDeviceGetUUID": "GPU-0-0",
    "nvmlDeviceGetClockInfo": {pynvml.NVML_CLOCK_SM: 1740, pynvml.NVML_CLOCK_MEM: 2619},
    "nvmlDeviceGetMaxClockInfo": {pynvml.NVML_CLOCK_MEM: 2619},
    "nvmlDeviceGetApplicationsClock": {pynvml.NVML_CLOCK_SM: 1980},
    "nvmlDeviceGetDefaultApplicationsClock": {pynvml.NVML_CLOCK_SM: 1980},
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetPowerUsage": 691_500,
    "nvmlDeviceGetTemperature": {pynvml.NVML_TEMPERATURE_GPU: 61},
    "nvmlDeviceGetTemperatureThreshold": {pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89},
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
}


def test_medians_the_highest_temperature_and_the_fastest_pcie_link_are_reported() -> None:
    gpu = Gpu(**H100)
    one = sample(Nvml(gpu), gpu)
    assert one == Sample(
        sm_clock_mhz=1740,
        power_w=691.5,
        temperature_c=61,
        reasons=("software power cap",),
        pcie_generation=5,
        memory_clock_mhz=2619,
    )
    idle = Sample(sm_clock_mhz=345, power_w=80.0, temperature_c=35, reasons=(), pcie_generation=1)
    hot = Sample(sm_clock_mhz=1200, temperature_c=90, reasons=("hardware thermal slowdown",))
    reported = health(Nvml(gpu), gpu, 3, [idle, *[one] * 17, hot, hot])
    assert (reported.when, reported.rank, reported.uuid) == ("loaded", 3, "GPU-0-0")
    assert (reported.sm_clock_mhz, reported.power_w, reported.temperature_c) == (1740, 691.5, 90)
    assert (reported.power_limit_w, reported.power_default_w, reported.slowdown_c) == (700.0, 700.0, 89)
    assert (reported.pcie_generation, reported.pcie_generation_most, reported.pcie_generation_gpu) == (
        5,
        5,
        5,
    )
    assert (reported.memory_clock_mhz, reported.memory_clock_most_mhz) == (2619, 2619)
    assert (reported.sm_clock_set_mhz, reported.sm_clock_default_mhz) == (1980, 1980)
    assert reported.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    seldom = health(Nvml(gpu), gpu, 3, [*[one] * 18, hot])
    assert seldom.throttle_reasons == ("software power cap",), "once in nineteen samples"


def test_values_that_a_gpu_does_not_report_are_unknown() -> None:
    gpu = Gpu(nvmlDeviceGetUUID="GPU-0-0")
    reported = health(Nvml(gpu), gpu, 0, [sample(Nvml(gpu), gpu)] * 5)
    assert reported == GpuHealth(rank=0, uuid="GPU-0-0", when="loaded")


def test_a_missing_temperature_limit_is_derived_from_the_margin() -> None:
    gpu = Gpu(
        nvmlDeviceGetUUID="GPU-0-0",
        nvmlDeviceGetTemperature={pynvml.NVML_TEMPERATURE_GPU: 61},
        nvmlDeviceGetMarginTemperature=26,
    )
    assert health(Nvml(gpu), gpu, 0, [sample(Nvml(gpu), gpu)] * 5).slowdown_c == 87


def test_samples_during_the_load_are_reported_with_the_health_after_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Nvml(Gpu(**H100))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    enough, count = threading.Event(), 0

    def clock(_: int) -> int:
        nonlocal count
        count += 1
        if count > 5:
            enough.set()
        return 1740

    library.gpus[0].answers["nvmlDeviceGetClockInfo"] = clock
    with load_probe.watched(context):
        assert enough.wait(10)
    reported = [record(GpuHealth, state) for state in gpus_probe.health(context, "after")]
    assert [(state.when, state.sm_clock_mhz) for state in reported] == [("loaded", 1740), ("after", 1740)]
    assert reported[1].pcie_width_most == 16
    assert [state["when"] for state in gpus_probe.health(context, "after")] == ["after"], "told once"


def test_without_a_gpu_nothing_is_sampled(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    with load_probe.watched(context):
        pass
    assert context.stored["loaded"] is None
    assert gpus_probe.health(context, "after") == []
