"""Sampling of one node: GPUs through NVML, the step's process tree and the host through psutil.

GPU memory is sampled per device, not per process, because inside a container NVML cannot identify the
container's processes. The memory in use at the start of the step is recorded separately.

GPUs and host have separate schedules and CPU budgets: reading the memory of a process with gigabytes of pages
may take the kernel a second, and no peak of a GPU must be missed meanwhile.
"""

from __future__ import annotations

import math
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from decorators.profile.process_tree import ProcessTree
from estimator.hardware.visible_gpus import visible_handles

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
# Shares of one core, 0.4 % in total. GPU memory has a separate budget: it must catch peaks, and the driver
# answers without querying the device, unlike power and temperature.
GPU_MEMORY_CPU_BUDGET = 0.001
GPU_FIGURES_CPU_BUDGET = 0.0005
HOST_CPU_BUDGET = 0.0025
PSS_SECONDS = 10.0
PSS_CPU_BUDGET = 0.001
GROWN = 1.1  # growth of resident memory since the last PSS sample that allows ten times the budget
PSS_OF_PEAK = 0.9  # minimum share of the peak resident memory for a PSS sample to count as the peak's
SHORTEST_CPU_S = 0.5  # minimum interval for measuring the cores in use: clocks tick in hundredths
KEPT_SAMPLES = 1000
MAX_NOTES = 5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """Sample of one GPU. None: not sampled at this time, or not supported by the device."""

    used_bytes: int
    utilization: float | None = None  # 0 to 1
    power_watts: float | None = None
    temperature_celsius: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpusSample:
    """Sample of all GPUs."""

    at: float
    gpus: tuple[GpuSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """Sample of the step's processes and their host."""

    at: float
    rss_bytes: int
    pss_bytes: int | None  # None: not sampled at this time
    used_bytes: int
    shared_memory_bytes: int | None
    disk_free_bytes: int | None
    cpu_cores: float | None = None  # in use since the last sample


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuInfo:
    index: int
    name: str
    total_bytes: int


class Gpus:
    """GPUs that this process may use. ``note``: the reason if there are none."""

    def __init__(self) -> None:
        self.infos: list[GpuInfo] = []
        self.note = ""
        self._handles: list[Any] = []
        try:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            for handle in visible_handles(pynvml, slices=True):
                self._add(handle)
            if not self.infos:
                self.note = "No GPU is visible to this step: only host memory is measured."
        except Exception as error:  # noqa: BLE001  # a profiler never breaks a step
            if type(error).__name__ in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
                self.note = "No NVIDIA GPU on this machine: only host memory is measured."
            else:
                self.note = f"GPUs are not measured, only host memory: {_one_line(error)}."

    def _add(self, handle: Any) -> None:
        name = self._nvml.nvmlDeviceGetName(handle)
        self.infos.append(
            GpuInfo(index=len(self.infos), name=name, total_bytes=int(self._memory(handle).total))
        )
        self._handles.append(handle)

    def memory(self) -> tuple[GpuSample, ...]:
        """Sample each GPU's memory only."""
        return tuple(GpuSample(used_bytes=int(self._memory(handle).used)) for handle in self._handles)

    def with_figures(self, samples: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
        """Sample memory, utilization, power and temperature."""
        return tuple(
            replace(
                sample,
                utilization=self._query(
                    lambda h=handle: self._nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100
                ),
                power_watts=self._query(lambda h=handle: self._nvml.nvmlDeviceGetPowerUsage(h) / 1000),
                temperature_celsius=self._query(lambda h=handle: self._nvml.nvmlDeviceGetTemperature(h, 0)),
            )
            for sample, handle in zip(samples, self._handles, strict=True)
        )

    def _memory(self, handle: Any) -> Any:
        try:  # version 2 excludes memory reserved by the driver
            return self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        except Exception:  # noqa: BLE001  # older drivers, MIG devices
            return self._nvml.nvmlDeviceGetMemoryInfo(handle)

    @staticmethod
    def _query(call: Any) -> Any:
        try:
            return call()
        except Exception:  # noqa: BLE001  # a figure that this device has not got, as MIG has no utilization
            return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class Series(Generic[T]):
    """Samples of one kind, thinned evenly as they grow."""

    def __init__(self) -> None:
        self.samples: list[T] = []
        self.count = 0  # number of samples added
        self._stride = 1

    def add(self, sample: T) -> None:
        if self.count % self._stride == 0:
            self.samples.append(sample)
            if len(self.samples) >= KEPT_SAMPLES:
                self.samples = self.samples[::2]
                self._stride *= 2
        self.count += 1


@dataclass
class Samples:
    """All samples so far; must be read under the sampler's lock."""

    gpus: Series[GpusSample] = field(default_factory=Series)
    host: Series[HostSample] = field(default_factory=Series)
    rss_peak: int = 0
    pss_peak: int | None = None
    rss_at_pss_peak: int = 0
    forgotten_peak: int = 0
    shared_memory_peak: int | None = None
    disk_free_min: int | None = None
    gpu_start: tuple[int, ...] = ()
    gpu_peak: tuple[int, ...] = ()
    gpu_power_peak: list[float | None] = field(default_factory=list)
    gpu_temperature_peak: list[int | None] = field(default_factory=list)
    gpu_utilization: list[list[float]] = field(default_factory=list)  # [sum, seconds] per GPU

    @property
    def count(self) -> int:
        """Number of samples of the GPUs; without GPUs, of the host."""
        return self.gpus.count or self.host.count

    def add_host(self, sample: HostSample) -> None:
        """Add a sample of the host."""
        self.host.add(sample)
        self.rss_peak = max(self.rss_peak, sample.rss_bytes)
        if sample.pss_bytes is not None and sample.pss_bytes > (self.pss_peak or 0):
            self.pss_peak, self.rss_at_pss_peak = sample.pss_bytes, sample.rss_bytes
        self.shared_memory_peak = _maximum(self.shared_memory_peak, sample.shared_memory_bytes)
        minima = [free for free in (self.disk_free_min, sample.disk_free_bytes) if free is not None]
        self.disk_free_min = min(minima, default=None)

    def add_gpus(self, sample: GpusSample, seconds: float) -> None:
        """Add a sample of the GPUs; its utilization, if any, applies to the last ``seconds``."""
        self.gpus.add(sample)
        gpus = sample.gpus
        if len(gpus) != len(self.gpu_peak):
            self.gpu_start = self.gpu_peak = tuple(gpu.used_bytes for gpu in gpus)
            self.gpu_power_peak, self.gpu_temperature_peak = [None] * len(gpus), [None] * len(gpus)
            self.gpu_utilization = [[0.0, 0.0] for _ in gpus]
        self.gpu_peak = tuple(max(a, gpu.used_bytes) for a, gpu in zip(self.gpu_peak, gpus, strict=True))
        for i, gpu in enumerate(gpus):
            self.gpu_power_peak[i] = _maximum(self.gpu_power_peak[i], gpu.power_watts)
            self.gpu_temperature_peak[i] = _maximum(self.gpu_temperature_peak[i], gpu.temperature_celsius)
            if gpu.utilization is not None:
                self.gpu_utilization[i][0] += gpu.utilization * seconds
                self.gpu_utilization[i][1] += seconds

    @property
    def busy_cpu_cores(self) -> float | None:
        """Cores that 90 % of the samples stay below; None with fewer than three samples."""
        cores = sorted(sample.cpu_cores for sample in self.host.samples if sample.cpu_cores is not None)
        return cores[math.ceil(0.9 * len(cores)) - 1] if len(cores) >= 3 else None

    @property
    def pss_of_peak(self) -> int | None:
        """PSS at the peak of memory; None if none was sampled near it."""
        return self.pss_peak if self.rss_at_pss_peak >= PSS_OF_PEAK * self.rss_peak else None

    def add_peak(self, rss_bytes: int) -> None:
        """Add the kernel's own peak of a process, which samples may have missed."""
        if rss_bytes > self.forgotten_peak:
            self.rss_peak = max(self.rss_peak, rss_bytes)

    def forget_peaks(self) -> None:
        """Reset the peaks; the memory in use at the start of the step is kept."""
        self.forgotten_peak = highest_resident_bytes()
        self.rss_peak, self.pss_peak, self.shared_memory_peak = 0, None, None
        self.rss_at_pss_peak = 0
        self.gpu_peak = self.gpu_start


def _maximum(a: Any, b: Any) -> Any:
    values = [value for value in (a, b) if value is not None]
    return max(values) if values else None


class _Schedule:
    """Schedule of one kind of sample: after each interval, later if sampling costs more than its budget."""

    def __init__(self, interval_s: float, cpu_budget: float) -> None:
        self.next_at = 0.0
        self._interval, self._budget = interval_s, cpu_budget

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.next_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a sample in this block: its cost, also on failure, determines the time of the next one."""
        start = time.thread_time()
        try:
            yield
        finally:
            cost = time.thread_time() - start
            self.next_at = time.monotonic() + max(self._interval, cost / self._budget)


class Sampler:
    """Sample in a background thread until stopped; never raises into the step."""

    def __init__(self, interval_s: float, foreign: tuple[str, ...] = ()) -> None:
        self.lock = threading.Lock()
        self.samples = Samples()
        self.gpus: list[GpuInfo] = []
        self.notes: list[str] = []
        self.own_cpu_seconds = 0.0
        self.cpu_seconds = 0.0
        self.started = time.monotonic()
        self._tree = ProcessTree(foreign)
        self._memory_schedule = _Schedule(interval_s, GPU_MEMORY_CPU_BUDGET)
        self._figures_schedule = _Schedule(interval_s, GPU_FIGURES_CPU_BUDGET)
        self._host_schedule = _Schedule(interval_s, HOST_CPU_BUDGET)
        self._last_figures = self.started
        self._last_host: float | None = None
        self._next_pss = self._next_pss_if_grown = 0.0
        self._rss_at_pss = 0
        self._stop = threading.Event()
        self._sampled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-profile-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop; waits at most 5 seconds for a device that does not respond."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def wait_for_first_sample(self, timeout_s: float) -> None:
        """Block until host memory was sampled once or sampling ended, at most ``timeout_s``."""
        if self._thread.is_alive():
            self._sampled.wait(timeout_s)

    def note(self, text: str) -> None:
        """Record a note for the reader of the measurements, once."""
        with self.lock:
            if text not in self.notes and len(self.notes) < MAX_NOTES:
                self.notes.append(text)

    def _run(self) -> None:
        try:
            gpus = Gpus()
            with self.lock:
                self.gpus = gpus.infos
            if gpus.note:
                self.note(gpus.note)
            self._loop(gpus)
        except Exception as error:  # noqa: BLE001  # a profiler never breaks a step
            self.note(f"The profiler stopped: {_one_line(error)}.")
        finally:
            self._sampled.set()

    def _loop(self, gpus: Gpus) -> None:
        schedules = (self._memory_schedule, self._host_schedule) if gpus.infos else (self._host_schedule,)
        while True:
            stopping = self._stop.is_set()
            self._sample_gpus(gpus, last=stopping)
            if stopping or self._host_schedule.is_due:
                with self._note_failures(), self._host_schedule.timed():
                    self._sample_host(lambda: self._sample_gpus(gpus))
            with self.lock:
                self.own_cpu_seconds = time.thread_time()
            if stopping:
                return
            self._stop.wait(max(0.0, min(schedule.next_at for schedule in schedules) - time.monotonic()))

    @contextmanager
    def _note_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a profiler never breaks a step
            self.note(f"Some samples failed: {_one_line(error)}.")

    def _sample_gpus(self, gpus: Gpus, *, last: bool = False) -> None:
        """Sample the GPUs if scheduled now, or always if ``last``."""
        if not gpus.infos or not (last or self._memory_schedule.is_due):
            return
        with self._note_failures():
            at, seconds = time.time(), 0.0
            with self._memory_schedule.timed():
                samples = gpus.memory()
            if last or self._figures_schedule.is_due:
                with self._figures_schedule.timed():
                    samples = gpus.with_figures(samples)
                now = time.monotonic()
                seconds, self._last_figures = now - self._last_figures, now
            with self.lock:
                self.samples.add_gpus(GpusSample(at=at, gpus=samples), seconds)

    def _sample_host(self, on_read: Callable[[], None]) -> None:
        """Sample the host; ``on_read`` is called between the processes whose pages are counted."""
        rss, pss, now = self._tree.sample(), None, time.monotonic()
        has_grown = rss > GROWN * self._rss_at_pss and now >= self._next_pss_if_grown
        if now >= self._next_pss or has_grown:
            start = time.thread_time()
            pss = self._tree.pss(on_read)
            cost = time.thread_time() - start
            self._rss_at_pss = rss
            self._next_pss = now + max(PSS_SECONDS, cost / PSS_CPU_BUDGET)
            self._next_pss_if_grown = now + cost / (10 * PSS_CPU_BUDGET)
        memory = psutil.virtual_memory()
        sample = HostSample(
            at=time.time(),
            rss_bytes=rss,
            pss_bytes=pss,
            used_bytes=int(memory.total - memory.available),
            shared_memory_bytes=_used(SHARED_MEMORY),
            disk_free_bytes=_free(Path.cwd()),
            cpu_cores=(self._tree.cpu_seconds - self.cpu_seconds) / (now - self._last_host)
            if self._last_host is not None and now - self._last_host >= SHORTEST_CPU_S
            else None,
        )
        self._last_host = now
        with self.lock:
            self.samples.add_host(sample)
            self.samples.add_peak(highest_resident_bytes())
            self.cpu_seconds = self._tree.cpu_seconds
        self._sampled.set()


def highest_resident_bytes() -> int:
    """Return the peak of this process, or of an ended child if larger, by the kernel; 0 if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return 1024 * max(peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _used(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).used
    except OSError:
        return None


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
