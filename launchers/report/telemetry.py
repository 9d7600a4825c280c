"""Telemetry events of a run's training processes, and the files that contain them.

Each rank appends JSON lines to a separate file and flushes each line, so that the node's task, the card and
the trackers can follow the run, and a killed rank loses no event.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """Event of one rank."""

    rank: int
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistInfo(_Event):
    """Placement of a rank; written once, at the start."""

    local_rank: int
    world_size: int
    node: int
    host: str
    device: str  # "cuda:0 NVIDIA H200" or "cpu"
    backend: str  # "nccl", "gloo" or "none" (one process without a process group)
    scheduler: str  # "local", "kubernetes", "batch", "slurm", "pbs"
    engine: str
    pid: int
    kind: str = "dist"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(_Event):
    """One optimizer step of one rank. Times in seconds; loss is the mean over all ranks' tokens."""

    step: int  # 1 is the first
    loss: float | None  # rank 0 only
    lr: float | None
    grad_norm: float | None
    samples: int  # samples of this rank
    tokens: int  # tokens of this rank, without padding
    dt: float  # duration of the step
    dtf: float | None  # duration of the forward passes
    dtb: float | None  # duration of the backward passes
    metrics: dict[str, float] | None = None  # task-specific figures over all ranks; rank 0 only
    all_tokens: int | None = None  # tokens of all ranks, unless prepared data determines them; rank 0 only
    in_collectives: float | None = None  # part of dt in collectives, including the wait for other ranks
    loading: float | None = None  # part of dt in which the rank waited for data
    kind: str = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming(_Event):
    """Step timing reported to node 0 by one rank: total seconds, and seconds spent in collectives."""

    local_rank: int
    node: int
    host: str
    step: int
    dt: float
    in_collectives: float
    kind: str = "timing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggling(_Event):
    """A rank is late, or has recovered (launchers.report.stragglers)."""

    local_rank: int
    node: int
    host: str
    since: int  # first step of the window in which it was detected
    step: int  # last examined step
    share: float  # median lag in that window, as a share of the step
    over: bool = False  # whether the rank has recovered
    whole_node: bool = False  # whether all ranks of its node are late
    kind: str = "straggling"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(_Event):
    """Memory peaks of a process since its start, in bytes. GPU figures are torch's; None on a CPU."""

    step: int
    allocated_peak: int | None
    reserved_peak: int | None
    rss: int  # resident host memory now
    rss_peak: int
    kind: str = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(_Event):
    """A rank enters a phase: "load", "train", "evaluate", "checkpoint", "profile", "save" or "done"."""

    name: str
    step: int = 0
    kind: str = "phase"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled(_Event):
    """A rank has finished its profiled window, or failed to profile it."""

    step: int
    window: dict[str, Any] | None = None  # launchers.report.window.Window.to_dict()
    problem: str = ""  # reason if ``window`` is None
    kind: str = "profiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(_Event):
    """Progress of an evaluation after a step, or its result, which all ranks report."""

    step: int
    done: int  # rows evaluated so far, as counted by this rank
    rows: int
    seconds: float  # duration so far
    loss: float | None = None  # None: in progress
    metrics: dict[str, float] | None = None  # task-specific figures
    kind: str = "evaluated"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationImages(_Event):
    """Images that rank 0 generated from held-out captions after a step; step 0: by the base model."""

    step: int
    captions: tuple[str, ...]
    pictures: tuple[str, ...]  # one per caption, a PNG file in base64
    kind: str = "drawn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(_Event):
    """A rank continues in another way than planned."""

    text: str
    kind: str = "warned"


Event = (
    DistInfo
    | Step
    | StepTiming
    | Straggling
    | Memory
    | Phase
    | Profiled
    | Evaluated
    | EvaluationImages
    | Warned
)
_KINDS: dict[str, type[Any]] = {
    "dist": DistInfo,
    "step": Step,
    "memory": Memory,
    "phase": Phase,
    "profiled": Profiled,
    "evaluated": Evaluated,
    "drawn": EvaluationImages,
    "warned": Warned,
}


@cache
def _process(pid: int) -> psutil.Process:
    """Return a process; its creation reads several files of /proc, a query of its memory one."""
    return psutil.Process(pid)


def memory_now(rank: int, step: int) -> Memory:
    """Measure this process's memory; torch's figures are None before this process uses a GPU by torch."""
    torch = sys.modules.get("torch")
    # torch.cuda.max_memory_allocated would flatten and sort all statistics for one of them: 0.16 ms
    statistics = {} if torch is None else torch.cuda.memory_stats_as_nested_dict()
    allocated, reserved = (
        statistics[name]["all"]["peak"] if statistics else None
        for name in ("allocated_bytes", "reserved_bytes")
    )
    return Memory(
        rank=rank,
        step=step,
        allocated_peak=allocated,
        reserved_peak=reserved,
        rss=_process(os.getpid()).memory_info().rss,
        rss_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


# Environment variables of ranks that run a user's script: folders for events and for checkpoints
TELEMETRY_VARIABLE = "FINETUNE_TELEMETRY"
CHECKPOINTS_VARIABLE = "FINETUNE_CHECKPOINTS"


def path_of(telemetry_dir: Path, rank: int) -> Path:
    """Return the path of a rank's event file."""
    return telemetry_dir / f"rank-{rank:05d}.jsonl"


class Writer:
    """Writer of one rank's events; an event is in the file when :meth:`write` returns."""

    def __init__(self, telemetry_dir: Path, rank: int) -> None:
        telemetry_dir.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path_of(telemetry_dir, rank).open("a", buffering=1, encoding="utf-8")

    def write(self, event: Event) -> None:
        # dataclasses.asdict would copy every value: more than half of the cost of an event
        values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()


class Follower:
    """Reader of the events of a node's ranks while they are written; returns each event once."""

    def __init__(self, telemetry_dir: Path) -> None:
        self._dir = telemetry_dir
        self._offsets: dict[Path, int] = {}

    def poll(self) -> Iterator[Event]:
        """Iterate over events written since the last call; incomplete lines are left for the next call."""
        for path in sorted(self._dir.glob("rank-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    values = json.loads(line)
                    yield _KINDS[values["kind"]](**values)
