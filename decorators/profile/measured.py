"""Measured: resources that one node of a step used. Stored as an artifact and shown on the card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from estimator.rightsizing.usage import GpuUsage
from launchers.report.peak import MemoryPeak, largest_process
from launchers.report.state import RankMeasured


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMeasured:
    """One GPU during the step by NVML: the whole device, including other processes. None: unknown."""

    index: int
    name: str
    total_bytes: int
    start_used_bytes: int  # in use at the start of the step, by other processes or an earlier step
    peak_used_bytes: int
    mean_utilization: float | None  # 0 to 1: share of the time in which a kernel ran
    peak_power_watts: float | None
    peak_temperature_celsius: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One node of a step. None: not measured."""

    step: str
    node: int
    host: str
    duration_seconds: float
    samples: int
    sampling_seconds: float  # CPU time of the profiler
    gpus: tuple[GpuMeasured, ...]
    ranks: tuple[RankMeasured, ...]
    host_total_bytes: int
    host_rss_peak_bytes: int | None  # of the step's process tree; shared pages count once per process
    # the same with shared pages counted once; None: not sampled near the peak
    host_pss_peak_bytes: int | None
    mean_cpu_cores: float | None  # of the step's process tree
    shared_memory_peak_bytes: int | None  # /dev/shm, of all processes
    disk_free_min_bytes: int | None  # of the file system of the working directory
    steps: int  # optimizer steps seen
    tokens_per_second: float | None  # over all processes of the run; median over all steps except the first
    mfu: float | None  # 0 to 1
    usd: float | None  # for this duration at the plan's price
    notes: tuple[str, ...]
    checkpoint_seconds: float | None = None  # median pause of training for a checkpoint
    busy_cpu_cores: float | None = None  # 90th percentile over the samples; mean for a short step
    own_loop: bool = False  # trained by the step's own code, not by one of the launched engines
    step_tokens: float | None = None  # of all processes, without padding; median as tokens_per_second
    data_wait_share: float | None = None  # largest share of a rank's steps that it waited for data

    @property
    def sampling_share(self) -> float:
        """CPU time of the profiler as a share of the step's duration."""
        return self.sampling_seconds / self.duration_seconds if self.duration_seconds > 0 else 0.0

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(gpu.name for gpu in self.gpus)

    @property
    def memory_peak(self) -> MemoryPeak | None:
        """Largest process and the counter of its memory; None if no process reported memory.

        On a GPU, NVML's peak minus the memory in use before the step; if NVML was not sampled or reported
        less than torch reserved, the reserved memory. On a CPU, resident memory.
        """
        return process_peak(self.ranks, self.gpus)

    @property
    def memory_peak_bytes(self) -> int | None:
        """Bytes of :attr:`memory_peak`."""
        return self.memory_peak.size_bytes if self.memory_peak else None

    @property
    def gpu_usage(self) -> tuple[GpuUsage, ...]:
        """What each GPU was used for, beyond what was in use before the step."""
        return tuple(
            GpuUsage(
                name=gpu.name,
                total_bytes=gpu.total_bytes,
                peak_bytes=max(gpu.peak_used_bytes - gpu.start_used_bytes, 0),
                utilization=gpu.mean_utilization,
            )
            for gpu in self.gpus
        )

    @property
    def host_peak_bytes(self) -> int | None:
        """Host memory of the node's processes: PSS if sampled, else resident memory."""
        return self.host_pss_peak_bytes or self.host_rss_peak_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "sampling_share": self.sampling_share}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


def process_peak(ranks: Sequence[RankMeasured], gpus: Sequence[GpuMeasured]) -> MemoryPeak | None:
    """Return the largest of several training processes, each alone on its GPU if it has one."""
    return largest_process(
        (rank.reserved_peak_bytes for rank in ranks),
        (rank.rss_peak_bytes for rank in ranks),
        device_bytes=max((gpu.peak_used_bytes - gpu.start_used_bytes for gpu in gpus), default=0),
    )
