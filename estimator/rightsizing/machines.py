"""Choice of the cheapest machine with the resources of a step, and hourly prices of resources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator import hardware
from estimator.data import load_rows
from estimator.errors import UserError
from estimator.formatting import GIB, MIB, format_bytes
from estimator.hardware import Gpu
from estimator.job import Target
from estimator.plan import Request
from estimator.planning.capacity import why_rare
from estimator.planning.goals import Goals
from estimator.planning.places import ALLOCATABLE, Place, list_places
from estimator.planning.step_requests import CPU_OF_A_GPU, CPU_OUTSIDE_RANKS, SHARED_MEMORY_PER_GPU
from estimator.rightsizing.recommend import Recommendation
from estimator.rightsizing.usage import Sizes

CPU_MACHINES = Path(__file__).parents[1] / "data" / "cpu_machines.csv"
# Metaflow's own defaults of @kubernetes and @batch
USUAL_CPU = 1
USUAL_MEMORY_MIB = 4096
USUAL_DISK_MIB = 10240


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Minimum resources of one node. None: no requirement."""

    cpu: float | None = None
    memory_mib: int | None = None
    gpus: int = 0
    gpu_memory_bytes: int | None = None  # of each GPU
    flops: float | None = None  # dense peak of each GPU in its training type (:func:`flops_of`)

    def describe(self, gpu: str | None) -> str:
        """Format the needs: "2x A10G, 40 GiB of memory"."""
        parts = [f"{self.gpus}x {gpu or 'GPU'}"] if self.gpus else []
        if self.gpu_memory_bytes:
            parts.append(f"{format_bytes(self.gpu_memory_bytes)} of GPU memory")
        if self.cpu:
            parts.append(f"{self.cpu:g} CPU")
        if self.memory_mib:
            parts.append(f"{format_bytes(self.memory_mib * MIB)} of memory")
        return ", ".join(parts)


def choose_machine(needs: Needs, target: Target, goals: Goals) -> Request:
    """Return the request of one node: on the cheapest machine with the required GPUs, or on any if none are.

    Raises UserError where there is none.
    """
    if not needs.gpus:
        return Request(
            nodes=1,
            gpus_per_node=0,
            gpu_type=None,
            cpu=round(needs.cpu or USUAL_CPU),
            memory_mib=needs.memory_mib or USUAL_MEMORY_MIB,
            shared_memory_mib=0,
            disk_mib=USUAL_DISK_MIB,
        )
    if target.machine is not None:
        return _on_this_machine(needs, target)
    fitting = [place for place in list_places(target, goals, any_gpu=True) if _has(place, needs)]
    if not fitting:
        source = goals.cluster.where if goals.cluster is not None else "the instance table"
        raise UserError(
            f"No machine of {source} has {needs.describe(target.gpu)}.",
            "Ask for less, or see `finetune gpus`.",
        )
    place = min(fitting, key=lambda each: _rank(each, needs))
    share = needs.gpus / place.gpus
    cpu = needs.cpu or CPU_OF_A_GPU * needs.gpus + CPU_OUTSIDE_RANKS
    if place.vcpu is not None and needs.cpu is None:
        cpu = min(cpu, max(int(place.vcpu * place.allocatable * share), 1))
    memory = needs.memory_mib or USUAL_MEMORY_MIB * needs.gpus
    if place.ram_bytes is not None and needs.memory_mib is None:
        memory = int(place.ram_bytes * place.allocatable * share / MIB)
    return Request(
        nodes=1,
        gpus_per_node=needs.gpus,
        gpu_type=place.gpu.name,
        cpu=round(cpu),
        memory_mib=memory,
        shared_memory_mib=min(SHARED_MEMORY_PER_GPU * needs.gpus // MIB, memory // 4),
        disk_mib=USUAL_DISK_MIB,
        instance_type=place.name or None,
        cloud=place.cloud,
        spot=place.spot,
        gpu_assumed=place.gpu_assumed,
    )


def _on_this_machine(needs: Needs, target: Target) -> Request:
    machine = target.machine
    assert machine is not None  # noqa: S101 - checked by the caller
    gpu_names = {gpu.name for gpu in hardware.gpus_called(target.gpu)} if target.gpu else None
    names = [
        table_gpu.name if (table_gpu := hardware.find_gpu_by_nvml_name(name)) else name
        for name, _ in machine.gpus
    ]
    fitting = [
        name
        for name, (_, memory) in zip(names, machine.gpus, strict=True)
        if memory >= (needs.gpu_memory_bytes or 0) and (gpu_names is None or name in gpu_names)
    ]
    if len(fitting) < needs.gpus:
        present = f"{len(names)}x {names[0]}" if names else "no GPU"
        raise UserError(
            f"This machine has {present}, and the step asks for {needs.describe(target.gpu)}.",
            "Run it elsewhere (--with kubernetes, --with batch), or ask for less.",
        )
    return Request(
        nodes=1,
        gpus_per_node=needs.gpus,
        gpu_type=fitting[0],
        cpu=round(needs.cpu or machine.cpu_cores),
        memory_mib=needs.memory_mib or machine.ram_bytes // MIB,
        shared_memory_mib=0,
        disk_mib=USUAL_DISK_MIB,
    )


def _has(place: Place, needs: Needs) -> bool:
    return (
        place.gpus >= needs.gpus
        and place.gpu.usable_bytes >= (needs.gpu_memory_bytes or 0)
        and (flops_of(place.gpu) or 0.0) >= (needs.flops or 0.0)
        and (place.vcpu is None or place.vcpu * place.allocatable >= (needs.cpu or 0))
        and (place.ram_bytes is None or place.ram_bytes * place.allocatable >= (needs.memory_mib or 0) * MIB)
    )


def _rank(place: Place, needs: Needs) -> tuple[object, ...]:
    """Sort key: availability, then the price of the instance, or of its part on a shared node."""
    price = place.usd_per_hour
    if price is not None and place.shared:
        price *= needs.gpus / place.gpus
    has_price = price is not None
    return (
        place.tier,
        bool(why_rare(place)),
        not has_price,
        price or 0.0,
        place.gpu.usable_bytes,
        place.gpus,
    )


def flops_of(gpu: Gpu) -> float | None:
    """Return the peak FLOP/s in the type that the GPU trains in: bf16, else fp32."""
    return gpu.peak_flops("bf16" if gpu.bf16 else "fp32")


def needs_of(recommendation: Recommendation, sizes: Sizes) -> Needs | None:
    """Return the resources of a GPU machine for a recommendation: enough memory, and no slower for the step.

    None without GPUs, or for a GPU that is not in the GPU table.
    """
    gpu = hardware.find_gpu_by_nvml_name(sizes.gpu_type) if sizes.gpu_type else None
    if not sizes.gpus or gpu is None:
        return None
    rate, utilization = flops_of(gpu), recommendation.gpu_utilization
    return Needs(
        cpu=sizes.cpu,
        memory_mib=sizes.memory_mib,
        gpus=sizes.gpus,
        gpu_memory_bytes=recommendation.gpu_memory_bytes,
        flops=rate * (1.0 if utilization is None else utilization) if rate is not None else None,
    )


def usd_per_hour(sizes: Sizes) -> float | None:
    """Return the price of sizes: their share of the cheapest machine on demand; None if there is no price."""
    if sizes.cpu is None and sizes.memory_mib is None and not sizes.gpus:
        return None
    cpu, memory = sizes.cpu or USUAL_CPU, (sizes.memory_mib or USUAL_MEMORY_MIB) * MIB
    if not sizes.gpus:
        return min(usd * max(cpu / cores, memory / ram) for cores, ram, usd in _cpu_machines())
    gpu = hardware.find_gpu_by_nvml_name(sizes.gpu_type) if sizes.gpu_type else None
    prices = [
        item.usd_per_hour
        * max(
            sizes.gpus / item.gpu_count,
            cpu / (item.vcpu * ALLOCATABLE),
            memory / (item.ram_bytes * ALLOCATABLE),
        )
        for item in hardware.instances()
        if gpu is not None and item.gpu == gpu.name and item.gpu_count >= sizes.gpus
        if item.usd_per_hour is not None and item.vcpu and item.ram_bytes
    ]
    return min(prices, default=None)


@lru_cache(maxsize=1)
def _cpu_machines() -> tuple[tuple[int, float, float], ...]:
    """Return the rows of (cores, bytes of memory, USD per hour)."""
    return tuple(
        (int(row["cpu"]), float(row["memory_gib"]) * GIB, float(row["usd_per_hour"]))
        for row in load_rows(CPU_MACHINES)
    )
