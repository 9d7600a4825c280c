"""Sampling with real processes and a simulated NVML."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
import types
from typing import Any

import pytest

from decorators.profile import sampling
from decorators.profile.process_tree import ProcessTree
from decorators.profile.sampling import GpuInfo, Gpus, GpuSample, GpusSample, HostSample, Sampler, Samples
from decorators.profiler import Profile
from tests.decorators.conftest import wait_until

MIB = 2**20
HOLD = (
    "import os, sys, time; block = bytearray(os.urandom(1 << 20) * int(sys.argv[1])); "
    "print('held', flush=True); time.sleep(60)"
)
DETACHED = (
    "import subprocess, sys; "
    "subprocess.Popen([sys.executable, '-c', sys.argv[1], '120'], start_new_session=True).wait()"
)


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    import psutil

    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.communicate()


def test_memory_of_grandchildren_in_other_sessions_is_counted() -> None:
    tree = ProcessTree()
    before = tree.sample()
    child = subprocess.Popen([sys.executable, "-c", DETACHED, HOLD], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert tree.sample() - before > 110 * MIB
    finally:
        _end(child)


def test_the_task_of_another_node_is_ignored_with_its_children() -> None:
    everything, node_tree = ProcessTree(), ProcessTree(foreign=("--ubf-context", "ubf_task"))
    child = subprocess.Popen(
        [sys.executable, "-c", DETACHED, HOLD, "--ubf-context", "ubf_task"], stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert everything.sample() - node_tree.sample() > 110 * MIB
    finally:
        _end(child)


def test_shared_pages_count_once_in_the_proportional_size() -> None:
    tree = ProcessTree()
    assert 0 < (tree.pss() or 0) <= tree.sample()


def test_cpu_time_of_children_is_counted() -> None:
    tree = ProcessTree()
    tree.sample()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(lambda: (tree.sample(), tree.cpu_seconds > 0.3)[1], 20)
    finally:
        _end(busy)


def test_the_peak_of_each_measurement_is_its_maximum_despite_unknown_samples() -> None:
    samples = Samples()
    for value in (None, 20, 50, 30, None):
        host = dataclasses.replace(_host(value or 1), shared_memory_bytes=value, pss_bytes=value)
        samples.add_host(host)
        watts = None if value is None else float(value)
        gpu = GpuSample(used_bytes=1, power_watts=watts, temperature_celsius=value)
        samples.add_gpus(GpusSample(at=0.0, gpus=(gpu,)), 1.0)
    assert (samples.shared_memory_peak, samples.pss_peak, samples.rss_at_pss_peak) == (50, 50, 50)
    assert (samples.gpu_power_peak, samples.gpu_temperature_peak) == ([50.0], [50])


@pytest.mark.parametrize(("rss_peak", "expected"), [(100, 80), (101, None)])
def test_the_proportional_size_is_reported_only_if_sampled_near_the_memory_peak(
    rss_peak: int, expected: int | None
) -> None:
    samples = Samples()
    near = round(sampling.PSS_OF_PEAK * 100)
    samples.add_host(dataclasses.replace(_host(near), pss_bytes=80))
    samples.add_host(_host(rss_peak))
    assert samples.pss_of_peak == expected


def test_reset_peaks_start_from_the_gpu_memory_used_at_the_start() -> None:
    samples = Samples()
    for used in (10, 30):
        samples.add_host(_host(used))
        samples.add_gpus(_gpus(used), 1.0)
    samples.forget_peaks()
    samples.add_gpus(_gpus(20), 1.0)
    assert samples.rss_peak == 0, "a look at the GPUs alone brings no host's peak back"
    samples.add_host(_host(5))
    assert samples.rss_peak == 5
    assert (samples.gpu_start, samples.gpu_peak) == ((10,), (20,))


def test_utilization_is_weighted_by_the_time_since_the_last_query() -> None:
    samples = Samples()
    for utilization, seconds in ((0.0, 1.0), (None, 0.0), (None, 0.0), (0.8, 3.0)):
        gpu = GpuSample(used_bytes=1, utilization=utilization)
        samples.add_gpus(GpusSample(at=0.0, gpus=(gpu,)), seconds)
    total, seconds = samples.gpu_utilization[0]
    assert (total / seconds, seconds) == (pytest.approx(0.6), 4.0)


def test_a_disk_that_was_full_once_is_recorded_as_full() -> None:
    samples = Samples()
    for free in (None, 5, 0, 7):
        samples.add_host(dataclasses.replace(_host(1), disk_free_bytes=free))
    assert samples.disk_free_min == 0


def test_a_long_run_keeps_few_samples_and_all_its_peaks() -> None:
    samples = Samples()
    for number in range(20_000):
        used = number if number != 11_111 else 10**9
        samples.add_gpus(_gpus(used), 1.0)
        samples.add_host(_host(used))
    for series in (samples.gpus, samples.host):
        assert len(series.samples) < sampling.KEPT_SAMPLES
        assert series.count == samples.count == 20_000
        gaps = {round(b.at - a.at) for a, b in zip(series.samples, series.samples[1:], strict=False)}
        assert len(gaps) == 1  # still evenly spread
    assert samples.rss_peak == samples.gpu_peak[0] == 10**9


def test_gpu_peaks_are_sampled_if_host_sampling_exceeds_its_time_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ProcessTree, "pss", lambda *_: _burn(0.3))
    gpus = _RisingGpus()
    sampler = _started(monkeypatch, gpus)
    wait_until(lambda: sampler.samples.host.count > 0, 20)  # the next one is due in two minutes
    for used in (130, 2):
        seen = sampler.samples.gpus.count
        gpus.used = used
        wait_until(lambda seen=seen: sampler.samples.gpus.count > seen + 1, 20)
    sampler.stop()
    assert sampler.samples.gpu_start == (1,)
    assert sampler.samples.gpu_peak == (130,)
    assert sampler.samples.host.count == 2  # the first and the last


def test_expensive_power_queries_do_not_delay_memory_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _RisingGpus(dear_figures=0.05)
    sampler = _started(monkeypatch, gpus)
    wait_until(lambda: sampler.samples.gpus.count > 4, 20)
    sampler.stop()
    assert gpus.asked == 2  # the first time and the last


def test_the_last_sample_is_taken_at_the_end_of_gpus_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _RisingGpus(dear_memory=0.05)
    sampler = _started(monkeypatch, gpus)
    wait_until(lambda: sampler.samples.host.count > 0, 20)
    gpus.used = 77
    sampler.stop()
    last = sampler.samples.gpus.samples[-1].gpus[0]
    assert (last.used_bytes, last.utilization) == (77, 0.5)
    assert sampler.samples.host.count >= 2
    assert sampler.own_cpu_seconds > 0.05


@pytest.mark.parametrize("failing", ["memory", "host"])
def test_a_failing_sample_is_noted_once_and_raises_no_error(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("the device has fallen off the bus")

    monkeypatch.setattr(sampling, "HOST_CPU_BUDGET", 1.0)
    monkeypatch.setattr(ProcessTree, "pss", lambda *_: 1)
    monkeypatch.setattr(
        _RisingGpus if failing == "memory" else ProcessTree,
        "memory" if failing == "memory" else "sample",
        fails,
    )
    sampler = _started(monkeypatch, _RisingGpus())
    other = sampler.samples.host if failing == "memory" else sampler.samples.gpus
    wait_until(lambda: other.count > 1, 20)
    sampler.stop()
    assert sum("fallen off the bus" in note for note in sampler.notes) == 1


def test_without_a_gpu_only_host_memory_is_measured_and_the_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    profile = Profile(plan=None, step="train", interval_s=0.05)
    profile.start()
    time.sleep(0.3)
    profile.stop()
    measured = profile.measured()
    assert measured.gpus == ()
    assert measured.host_rss_peak_bytes > 10 * MIB
    assert measured.samples >= 1
    assert any("only host memory" in note for note in measured.notes)
    assert measured.to_dict()["sampling_share"] == measured.sampling_share
    profile._card_seconds = 50.0  # drawing the card is part of the cost
    assert profile.measured().sampling_seconds > 50


def test_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(3))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus()
    assert [info.name for info in gpus.infos] == ["Test GPU"] * 3
    assert gpus.memory()[2] == GpuSample(used_bytes=2 * MIB)
    assert gpus.with_figures(gpus.memory())[2] == GpuSample(
        used_bytes=2 * MIB, utilization=0.5, power_watts=250.0, temperature_celsius=60
    )


@pytest.mark.parametrize(
    ("visible", "expected_gpus"),
    [("2,0", [2, 0]), ("", []), ("-1", []), ("1,9,0", [1]), ("GPU-2", [2]), ("MIG-abc", [7])],
)
def test_only_the_visible_gpus_are_measured(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected_gpus: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = Gpus()
    assert [sample.used_bytes // MIB for sample in gpus.memory()] == expected_gpus
    assert bool(gpus.note) == (not expected_gpus)


def test_measurements_that_a_gpu_does_not_report_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _nvml(1)
    nvml.nvmlDeviceGetUtilizationRates = nvml.nvmlDeviceGetPowerUsage = _unsupported
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus()
    sample = gpus.with_figures(gpus.memory())[0]
    assert sample.utilization is None
    assert sample.power_watts is None
    assert sample.temperature_celsius == 60


def _unsupported(*_: Any) -> Any:
    raise RuntimeError("Not Supported")


def _nvml(count: int) -> Any:
    """Return a replacement for the module pynvml with a few GPUs; a handle is the number of the GPU."""
    nvml: Any = types.ModuleType("pynvml")
    nvml.nvmlMemory_v2 = 2
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetHandleByUUID = lambda _: 7  # a slice
    nvml.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"
    nvml.nvmlDeviceGetName = lambda _: "Test GPU"
    nvml.nvmlDeviceGetMemoryInfo = lambda handle, **_: types.SimpleNamespace(
        total=100 * MIB, used=handle * MIB
    )
    nvml.nvmlDeviceGetUtilizationRates = lambda _: types.SimpleNamespace(gpu=50)
    nvml.nvmlDeviceGetPowerUsage = lambda _: 250_000
    nvml.nvmlDeviceGetTemperature = lambda *_: 60
    return nvml


class _RisingGpus(Gpus):
    """One GPU with ``used`` bytes in use; each query may cost processor time."""

    def __init__(self, *, dear_memory: float = 0.0, dear_figures: float = 0.0) -> None:
        self.infos, self.note = [GpuInfo(index=0, name="Test GPU", total_bytes=144)], ""
        self.used, self.asked = 1, 0
        self._dear_memory, self._dear_figures = dear_memory, dear_figures

    def memory(self) -> tuple[GpuSample, ...]:
        _burn(self._dear_memory)
        return (GpuSample(used_bytes=self.used),)

    def with_figures(self, samples: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
        self.asked += 1
        _burn(self._dear_figures)
        return tuple(dataclasses.replace(sample, utilization=0.5) for sample in samples)


def _started(monkeypatch: pytest.MonkeyPatch, gpus: _RisingGpus) -> Sampler:
    """A sampler of these GPUs, with an interval of 10 ms."""
    monkeypatch.setattr(sampling, "Gpus", lambda: gpus)
    sampler = Sampler(0.01)
    sampler.start()
    return sampler


def _burn(seconds: float) -> int:
    """Use processor time, like an expensive query."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return 1


def _gpus(used: int) -> GpusSample:
    return GpusSample(at=float(used), gpus=(GpuSample(used_bytes=used),))


def _host(used: int) -> HostSample:
    return HostSample(
        at=float(used),
        rss_bytes=used,
        pss_bytes=None,
        used_bytes=used,
        shared_memory_bytes=None,
        disk_free_bytes=None,
    )


def test_cpu_seconds_are_the_sum_of_user_and_system_time() -> None:
    tree = ProcessTree()
    tree.sample()
    assert tree.cpu_seconds == 0.0, "what was before does not count"
    begin = now = os.times()
    while now.system - begin.system < 0.05:
        os.urandom(1 << 20)
        now = os.times()
    tree.sample()
    assert tree.cpu_seconds >= now.user + now.system - begin.user - begin.system - 1e-6
