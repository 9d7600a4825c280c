"""Sampling with real processes and with stand-ins for NVML."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
import types
from typing import Any

import pytest

from decorators.profile import sampling
from decorators.profile.process_tree import ProcessTree
from decorators.profile.sampling import Gpus, GpuSample, Sample, Sampler, Samples
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


def _start(*words: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    import psutil

    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.communicate()


def test_memory_of_children_is_seen() -> None:
    tree = ProcessTree()
    before = tree.sample()
    child = _start(HOLD, "200")
    try:
        assert tree.sample() - before > 190 * MIB
    finally:
        _end(child)


def test_memory_of_grandchildren_in_sessions_of_their_own_is_seen() -> None:
    tree = ProcessTree()
    before = tree.sample()
    child = subprocess.Popen([sys.executable, "-c", DETACHED, HOLD], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree.sample() - before > 110 * MIB
    finally:
        _end(child)


def test_another_nodes_task_is_left_out_with_its_children() -> None:
    everything, own = ProcessTree(), ProcessTree(foreign=("--ubf-context", "ubf_task"))
    child = subprocess.Popen(
        [sys.executable, "-c", DETACHED, HOLD, "--ubf-context", "ubf_task"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert everything.sample() - own.sample() > 110 * MIB
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


def test_peaks_survive_what_comes_later() -> None:
    samples = Samples()
    for used in (10, 30, 20):
        samples.add(_sample(used), 1.0)
    assert samples.rss_peak == 30
    assert (samples.gpu_start, samples.gpu_peak) == ((10,), (30,))


def test_a_disk_that_was_full_is_remembered_as_full() -> None:
    samples = Samples()
    for free in (None, 5, 0, 7):
        samples.add(dataclasses.replace(_sample(1), disk_free_bytes=free), 1.0)
    assert samples.disk_free_min == 0


def test_a_long_run_keeps_few_samples_and_all_its_peaks() -> None:
    samples = Samples()
    for number in range(20_000):
        samples.add(_sample(number if number != 11_111 else 10**9), 1.0)
    assert len(samples.kept) < sampling.KEPT_SAMPLES
    assert samples.count == 20_000
    assert samples.rss_peak == 10**9
    gaps = {round(b.at - a.at) for a, b in zip(samples.kept, samples.kept[1:], strict=False)}
    assert len(gaps) == 1  # still evenly spread


def test_sampling_stays_below_half_a_percent_of_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def dear(self: Sampler, gpus: Gpus) -> Sample:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return _sample(1)

    monkeypatch.setattr(Sampler, "_sample", dear)
    sampler = Sampler(0.01)
    sampler.start()
    time.sleep(1)
    sampler.stop()
    assert sampler.samples.count <= 3  # each cost 20 ms: the next is due 5 s later, but for the last


def test_a_failing_sample_is_noted_once_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Sampler, gpus: Gpus) -> Sample:
        raise RuntimeError("the device has fallen off the bus")

    monkeypatch.setattr(Sampler, "_sample", failing)
    sampler = Sampler(0.01)
    sampler.start()
    time.sleep(0.2)
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


def test_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(3))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus()
    assert [info.name for info in gpus.infos] == ["Test GPU"] * 3
    assert gpus.sample()[2] == GpuSample(
        used_bytes=2 * MIB, utilisation=0.5, power_watts=250.0, temperature_celsius=60
    )


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("2,0", [2, 0]), ("", []), ("-1", []), ("1,9,0", [1]), ("GPU-2", [2]), ("MIG-abc", [7])],
)
def test_only_the_visible_gpus_are_measured(
    monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = Gpus()
    assert [sample.used_bytes // MIB for sample in gpus.sample()] == seen
    assert bool(gpus.note) == (not seen)


def test_what_a_gpu_doesnt_tell_is_unknown_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _nvml(1)
    nvml.nvmlDeviceGetUtilizationRates = nvml.nvmlDeviceGetPowerUsage = _unsupported
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sample = Gpus().sample()[0]
    assert sample.utilisation is None
    assert sample.power_watts is None
    assert sample.temperature_celsius == 60


def _unsupported(*_: Any) -> Any:
    raise RuntimeError("Not Supported")


def _nvml(count: int) -> Any:
    """A stand-in for the module pynvml with a few GPUs; a handle is the GPU's number."""
    nvml: Any = types.ModuleType("pynvml")
    nvml.nvmlMemory_v2 = 2
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetHandleByUUID = lambda _: 7  # a slice
    nvml.nvmlDeviceGetUUID = lambda index: f"GPU-{index}".encode()
    nvml.nvmlDeviceGetName = lambda _: b"Test GPU"
    nvml.nvmlDeviceGetMemoryInfo = lambda handle, **_: types.SimpleNamespace(
        total=100 * MIB, used=handle * MIB
    )
    nvml.nvmlDeviceGetUtilizationRates = lambda _: types.SimpleNamespace(gpu=50)
    nvml.nvmlDeviceGetPowerUsage = lambda _: 250_000
    nvml.nvmlDeviceGetTemperature = lambda *_: 60
    return nvml


def test_a_pss_from_before_the_peak_is_no_figure_of_the_peak() -> None:
    samples = Samples()
    samples.add(dataclasses.replace(_sample(60), pss_bytes=56), 1.0)
    assert samples.pss_of_peak == 56
    samples.add(_sample(500), 1.0)
    assert samples.pss_of_peak is None
    samples.add(dataclasses.replace(_sample(480), pss_bytes=400), 1.0)
    assert samples.pss_of_peak == 400


def _sample(used: int) -> Sample:
    gpu = GpuSample(used_bytes=used, utilisation=None, power_watts=None, temperature_celsius=None)
    return Sample(
        at=float(used),
        gpus=(gpu,),
        rss_bytes=used,
        pss_bytes=None,
        host_used_bytes=used,
        shared_memory_bytes=None,
        disk_free_bytes=None,
    )
