"""Finds the best layout of a job for a number of processes: sharding, micro batch, checkpointing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from estimator import memory, throughput
from estimator.engines import setup_of
from estimator.errors import UserError
from estimator.hardware import Gpu, Instance
from estimator.job import Job, nearest_multiple
from estimator.plan import GIB, Device, Layout, MemoryEstimate, Sharding

LARGEST_MICRO_BATCH = 64
RDMA_FABRICS = ("EFA", "IB ", "RoCE", "RDMA", "GPUDirect")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout on one kind of machine that fits."""

    layout: Layout
    memory: MemoryEstimate
    gpu: Gpu | None
    instance: Instance | None
    speed: throughput.Speed

    @property
    def usd_per_hour(self) -> float | None:
        if self.instance is None or self.instance.usd_per_hour is None:
            return None
        return self.instance.usd_per_hour * self.layout.nodes

    @property
    def usd_per_token(self) -> float | None:
        if self.usd_per_hour is None or self.speed.tokens_per_second is None:
            return None
        return self.usd_per_hour / 3600 / self.speed.tokens_per_second

    def rank(self) -> tuple[float, ...]:
        cost, speed = self.usd_per_token, self.speed.tokens_per_second
        hourly = float("inf") if self.usd_per_hour is None else self.usd_per_hour
        return (
            cost is None,
            speed is None,
            cost if cost is not None else 0.0,
            hourly if cost is None else 0.0,
            -(speed or 0.0),
            self.layout.nodes,
            self.layout.world_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """The leanest layout on one kind of machine, which still does not fit."""

    what: str
    needs: int
    has: int

    @property
    def over(self) -> float:
        return self.needs / self.has - 1

    def __str__(self) -> str:
        return f"{self.what}: needs {gib(self.needs)}, has {gib(self.has)}: {percent(self.over)} over"


class Search:
    """Finds the best layout of one job in one precision for a given number of processes.

    Memory depends on the layout only, so each layout is worked out once for all machines.
    """

    def __init__(self, job: Job, precision: Literal["bf16", "bf16-mixed", "fp32"], device: Device) -> None:
        self.job, self.precision, self.device = job, precision, device
        self._estimates: dict[Layout, MemoryEstimate] = {}
        self._layouts: dict[tuple[int, int], list[list[Layout]]] = {}

    def best(
        self, nodes: int, processes: int, capacity: int, gpu: Gpu | None, item: Instance | None = None
    ) -> Candidate | None:
        """The fastest layout whose upper bound fits, or None."""
        candidates = []
        for ladder in self._ladders(nodes, processes):
            fitting = (layout for layout in ladder if self.estimate(layout).upper_bytes <= capacity)
            layout = next(fitting, None)
            if layout is None:
                continue
            network = item.network_gbps if item else None
            rdma = item is not None and any(name in item.fabric for name in RDMA_FABRICS)
            speed = throughput.speed(setup_of(self.job, layout), gpu, network_gbps=network, rdma=rdma)
            estimate = replace(self.estimate(layout), capacity_bytes=capacity)
            candidates.append(Candidate(layout=layout, memory=estimate, gpu=gpu, instance=item, speed=speed))
        # Ladders come without checkpointing first and with the lowest ZeRO stage first: ties go to those
        return min(candidates, key=lambda c: -(c.speed.tokens_per_second or 0.0), default=None)

    def leanest(self, what: str, nodes: int, processes: int, capacity: int) -> Miss:
        """The layout that needs least, as a miss."""
        needs = min(self.estimate(ladder[-1]).upper_bytes for ladder in self._ladders(nodes, processes))
        return Miss(what=what, needs=needs, has=capacity)

    def estimate(self, layout: Layout) -> MemoryEstimate:
        if layout not in self._estimates:
            self._estimates[layout] = memory.estimate(setup_of(self.job, layout))
        return self._estimates[layout]

    def _ladders(self, nodes: int, processes: int) -> list[list[Layout]]:
        """For each kind of layout, its micro batches from the largest down."""
        key = (nodes, processes)
        if key not in self._layouts:
            wanted = self.job.activation_checkpointing
            self._layouts[key] = [
                [self._layout(nodes, processes, sharding, micro, checkpointing) for micro in self._micro(key)]
                for checkpointing in ((False, True) if wanted is None else (wanted,))
                for sharding in _shardings(self.job, nodes * processes)
            ]
        return self._layouts[key]

    def _micro(self, key: tuple[int, int]) -> list[int]:
        world = key[0] * key[1]
        if self.job.micro_batch:
            return [self.job.micro_batch]
        each = self.job.global_batch // world
        return [size for size in range(min(each, LARGEST_MICRO_BATCH), 0, -1) if each % size == 0]

    def _layout(
        self, nodes: int, processes: int, sharding: Sharding, micro: int, checkpointing: bool
    ) -> Layout:
        return Layout(
            device=self.device,
            nodes=nodes,
            processes_per_node=processes,
            sharding=sharding,
            micro_batch=micro,
            accumulation=self.job.global_batch // (micro * nodes * processes),
            seq_len=self.job.seq_len,
            activation_checkpointing=checkpointing,
            precision=self.precision,
            optimizer=self.job.optimizer,
            offload=self.job.offload,
        )

    def reasons(self, chosen: Candidate) -> list[str]:
        """Why precision, sharding, micro batch and checkpointing are as they are."""
        job, layout = self.job, chosen.layout
        if job.precision != "auto":
            precision = f"precision {layout.precision}, as asked"
        elif layout.precision == "fp32":
            precision = (
                f"precision fp32: {'CPUs' if layout.device == 'cpu' else 'this GPU'} without fast bf16"
            )
        elif layout.precision == "bf16":
            precision = "precision bf16, weights and optimizer too, as torchtune's recipes do"
        else:
            precision = "precision bf16 with fp32 master weights, as DeepSpeed does"
        lines = [precision, self._why_sharding(layout)]
        if job.micro_batch:
            micro = f"micro batch {layout.micro_batch}, as asked"
        elif layout.accumulation == 1:
            micro = f"micro batch {layout.micro_batch}: the whole batch at once fits"
        else:
            micro = f"micro batch {layout.micro_batch}: the largest that fits"
        passes = "1 forward pass" if layout.accumulation == 1 else f"{layout.accumulation} forward passes"
        lines.append(f"{micro} ({passes} for each step of {job.global_batch})")
        if job.activation_checkpointing is not None:
            word = "on" if layout.activation_checkpointing else "off"
            lines.append(f"activation checkpointing {word}, as asked")
        elif not layout.activation_checkpointing:
            lines.append("no activation checkpointing: the activations fit")
        else:
            without = self.estimate(replace(layout, activation_checkpointing=False)).upper_bytes
            lines.append(
                f"activation checkpointing: without it this micro batch needs {gib(without)} of "
                f"{gib(chosen.memory.capacity_bytes or 0)}"
            )
        return lines

    def _why_sharding(self, layout: Layout) -> str:
        stage = setup_of(self.job, layout).zero_stage
        if layout.sharding == "none":
            return "no sharding: one process"
        if stage is None:
            return f"FSDP: weights, gradients and optimizer divided over {layout.world_size} processes"
        if self.job.zero_stage is not None:
            return f"ZeRO stage {stage}, as asked"
        if layout.world_size == 1:
            return f"ZeRO stage {stage}: one process"
        return f"ZeRO stage {stage}: the fastest that fits; lower stages save nothing or do not fit"


def _shardings(job: Job, world: int) -> tuple[Sharding, ...]:
    if job.engine == "torchtune":
        return ("fsdp",) if world > 1 else ("none",)
    stages: tuple[Sharding, ...] = ("zero0", "zero1", "zero2", "zero3")
    if job.zero_stage is not None:
        return (stages[job.zero_stage],)
    if job.offload == "cpu":
        return ("zero2",) if world == 1 else ("zero2", "zero3")
    return ("zero0",) if world == 1 else stages[1:]


def precision_of(job: Job, device: Device, gpu: Gpu | None) -> Literal["bf16", "bf16-mixed", "fp32"]:
    """The precision of the layout: the user's, or what the device and the engine do well."""
    if job.precision == "fp32":
        return "fp32"
    if job.precision == "auto" and (device == "cpu" or (gpu is not None and not gpu.bf16)):
        return "fp32"
    return "bf16" if job.engine == "torchtune" else "bf16-mixed"


def divides(job: Job, world: int) -> bool:
    return job.global_batch % (world * (job.micro_batch or 1)) == 0


def indivisible(job: Job, world: int, what: str) -> UserError:
    step = world * (job.micro_batch or 1)
    micro = f" with micro batch {job.micro_batch}" if job.micro_batch else ""
    return UserError(
        f"A batch of {job.global_batch} can't be divided over {what}{micro}.",
        f"Nearest workable batch: {nearest_multiple(job.global_batch, step)} (any multiple of {step}).",
    )


def title(job: Job) -> str:
    return f"{job.model.name} ({job.method}, {job.engine}, {job.seq_len} tokens)"


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def percent(value: float) -> str:
    return f"{value * 100:.1f} %" if abs(value) < 0.1 else f"{value * 100:.0f} %"
