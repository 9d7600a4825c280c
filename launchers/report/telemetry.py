"""What the processes of a run write while they train, and how others read it.

Each rank appends JSON lines to its own file, flushed line by line, so that the node's task, the card
and the trackers can follow a run, and so that a killed rank loses nothing it has said.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class DistInfo:
    """Where a rank runs; written once, at the start."""

    rank: int
    local_rank: int
    world_size: int
    node: int
    host: str
    device: str  # "cuda:0 NVIDIA H200" or "cpu"
    backend: str  # "nccl", "gloo" or "none" (one process without a process group)
    scheduler: str  # "local", "kubernetes", "batch", "slurm", "pbs"
    engine: str
    pid: int
    at: float = field(default_factory=time.time)
    kind: str = "dist"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step as one rank saw it. Times in seconds; loss is the mean over all ranks' tokens."""

    rank: int
    step: int  # 1 is the first
    loss: float | None  # rank 0 only
    lr: float | None
    grad_norm: float | None
    samples: int  # of this rank, in this step
    tokens: int  # of this rank, in this step: all that went through the model, padding not counted
    dt: float  # whole step
    dtf: float | None  # forward passes
    dtb: float | None  # backward passes
    metrics: dict[str, float] | None = None  # the task's own, over all ranks; rank 0 only
    all_tokens: int | None = None  # of all ranks, where the data don't tell them; rank 0 only
    in_collectives: float | None = None  # of dt, in collectives: their transfer and the wait for others
    at: float = field(default_factory=time.time)
    kind: str = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What node 0 hears of a step of each rank of every node: seconds of it, and of them in collectives."""

    rank: int
    local_rank: int
    node: int
    host: str
    step: int
    dt: float
    in_collectives: float
    at: float = field(default_factory=time.time)
    kind: str = "pace"


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggling:
    """A rank for which the others wait (launchers.report.stragglers), or do so no more."""

    rank: int
    local_rank: int
    node: int
    host: str
    since: int  # the first step of those by which it was named
    step: int  # the last one that was looked at
    share: float  # of a step, the median: how long others wait for it; of the whole time that it was named
    over: bool = False  # from here on it is no later than others
    whole_node: bool = False  # all ranks of its node are late
    at: float = field(default_factory=time.time)
    kind: str = "straggling"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peaks since the start of the process, in bytes. GPU figures are torch's; None on a CPU."""

    rank: int
    step: int
    allocated_peak: int | None
    reserved_peak: int | None
    rss: int  # resident host memory now
    rss_peak: int
    at: float = field(default_factory=time.time)
    kind: str = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A rank has begun something that takes a while.

    "load", "train", "evaluate", "checkpoint", "profile", "save" or "done".
    """

    rank: int
    name: str
    step: int = 0
    at: float = field(default_factory=time.time)
    kind: str = "phase"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """A rank's profiled window has ended, or has failed."""

    rank: int
    step: int
    window: dict[str, Any] | None = None  # launchers.report.window.Window, as to_dict gives it
    problem: str = ""  # why there is none
    at: float = field(default_factory=time.time)
    kind: str = "profiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation on the held-out rows after a step: under way, or with its loss, which all ranks know."""

    rank: int
    step: int
    done: int  # rows so far, as this rank has seen them
    rows: int
    seconds: float  # so far
    loss: float | None = None  # None: under way
    metrics: dict[str, float] | None = None  # the task's own
    at: float = field(default_factory=time.time)
    kind: str = "evaluated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Pictures of held-out captions after a step (0: of the base), which rank 0 has."""

    rank: int
    step: int
    captions: tuple[str, ...]
    pictures: tuple[str, ...]  # of each, a PNG file in base64
    at: float = field(default_factory=time.time)
    kind: str = "drawn"


Event = DistInfo | Step | Pace | Straggling | Memory | Phase | Profiled | Evaluated | Drawn
_KINDS: dict[str, type[Any]] = {
    "dist": DistInfo,
    "step": Step,
    "memory": Memory,
    "phase": Phase,
    "profiled": Profiled,
    "evaluated": Evaluated,
    "drawn": Drawn,
}


def memory_now(rank: int, step: int) -> Memory:
    """Return the memory peaks of this process; torch's are None unless torch is imported and has a GPU."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    return Memory(
        rank=rank,
        step=step,
        allocated_peak=torch.cuda.max_memory_allocated() if torch is not None and on_gpu else None,
        reserved_peak=torch.cuda.max_memory_reserved() if torch is not None and on_gpu else None,
        rss=psutil.Process().memory_info().rss,
        rss_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def path_of(telemetry_dir: Path, rank: int) -> Path:
    return telemetry_dir / f"rank-{rank:05d}.jsonl"


class Writer:
    """Appends one rank's events; each is on disk when :meth:`write` returns."""

    def __init__(self, telemetry_dir: Path, rank: int) -> None:
        telemetry_dir.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path_of(telemetry_dir, rank).open("a", buffering=1, encoding="utf-8")

    def write(self, event: Event) -> None:
        self._file.write(json.dumps(dataclasses.asdict(event)) + "\n")

    def close(self) -> None:
        self._file.close()


class Follower:
    """Reads the events of all ranks of one node as they appear, each once."""

    def __init__(self, telemetry_dir: Path) -> None:
        self._dir = telemetry_dir
        self._offsets: dict[Path, int] = {}

    def poll(self) -> Iterator[Event]:
        """Events written since the last call; a line that is still being written waits for the next."""
        for path in sorted(self._dir.glob("rank-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    values = json.loads(line)
                    yield _KINDS[values["kind"]](**values)
