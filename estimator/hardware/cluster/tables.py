"""Tables of facts about Kubernetes nodes: GPU labels, taints, reserved resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows, parse_row
from estimator.hardware.catalogue import Instance
from estimator.plan import GIB

DATA = Path(__file__).parents[2] / "data"
ANY_SIZE = ""  # a reservation independent of the size of the node


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLabel:
    """Node labels that name a GPU type in one kind of cluster."""

    scheme: str  # "gfd", "karpenter", "eks-auto", "gke", "coreweave", "oke"
    gpu: str  # name in the GPU table
    labels: tuple[tuple[str, str], ...]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotLabel:
    """Label of spot nodes of one provider."""

    manager: str  # "Karpenter", "GKE", ...
    cloud: str
    label: str
    value: str
    source: str
    taint: str = ""  # "key=value:effect"; empty: none


@dataclass(frozen=True, kw_only=True, slots=True)
class PodResources:
    """CPU and memory for pods, or requested by pods, on one node."""

    cpu: float  # cores
    memory_bytes: int


@lru_cache(maxsize=1)
def gpu_labels() -> tuple[GpuLabel, ...]:
    return tuple(
        GpuLabel(
            scheme=row["scheme"],
            gpu=row["gpu"],
            labels=((row["label"], row["value"]), *_pairs(row["also"])),
            source=row["source"],
        )
        for row in _rows("gpu_labels.csv")
    )


def labels_of(gpu: str, scheme: str) -> list[GpuLabel]:
    """Return the labels of one GPU in one scheme; empty if unknown."""
    return [row for row in gpu_labels() if row.gpu == gpu and row.scheme == scheme]


def gpu_of_label(label: str, value: str) -> str | None:
    """Return the GPU identified by a single label; None if the table has no such row."""
    return next((row.gpu for row in gpu_labels() if row.labels == ((label, value),)), None)


@lru_cache(maxsize=1)
def spot_labels() -> tuple[SpotLabel, ...]:
    return tuple(SpotLabel(**parse_row(SpotLabel, row)) for row in _rows("spot_labels.csv"))


def is_spot(labels: Mapping[str, str]) -> bool | None:
    """Return whether these labels mark a spot node; None if unknown."""
    if spot_label_on(labels) is not None:
        return True
    return False if any(row.label in labels for row in spot_labels()) else None


def spot_label_on(labels: Mapping[str, str]) -> SpotLabel | None:
    """Return the row that marks a node with these labels as spot, or None."""
    return next((row for row in spot_labels() if labels.get(row.label) == row.value), None)


@lru_cache(maxsize=1)
def gpu_taints() -> tuple[tuple[str, str], ...]:
    """Return (key, value) patterns of the taints that reserve GPU nodes."""
    return tuple((row["key"], row["value"]) for row in _rows("taints.csv"))


@lru_cache(maxsize=1)
def temporary_taints() -> tuple[tuple[str, str], ...]:
    """Return (key pattern, state) of temporary taints, e.g. of draining nodes."""
    return tuple((row["key"], row["state"]) for row in _rows("passing_taints.csv"))


def pod_resources_on(instance: Instance) -> PodResources | None:
    """Estimate the resources for pods on an instance type; None if its size is unknown."""
    if instance.vcpu is None or instance.ram_bytes is None:
        return None
    memory = instance.ram_bytes / GIB - _reserved(
        "machine", "memory_gib", instance.ram_bytes / GIB, instance.cloud == "aws"
    )
    return PodResources(
        cpu=instance.vcpu - _reserved("kubelet", "cpu", instance.vcpu) - _reserved("daemons", "cpu", 0),
        memory_bytes=int(
            (memory - _reserved("kubelet", "memory_gib", memory) - _reserved("daemons", "memory_gib", 0))
            * GIB
        ),
    )


def daemons() -> PodResources:
    """Return typical requests of the daemon pods of a node, for when they cannot be read."""
    return PodResources(
        cpu=_reserved("daemons", "cpu", 0), memory_bytes=int(_reserved("daemons", "memory_gib", 0) * GIB)
    )


def _reserved(owner: str, resource: str, size: float, applies: bool = True) -> float:
    """Sum up the tiers of a reservation up to ``size``, and its fixed parts."""
    if not applies:
        return 0.0
    rows = [row for row in _rows("reserves.csv") if (row["who"], row["resource"]) == (owner, resource)]
    tiers = [(float(row["above"]), float(row["share"])) for row in rows if row["above"] != ANY_SIZE]
    bounds = [threshold for threshold, _ in tiers] + [float("inf")]
    shares = sum(
        max(0.0, min(size, end) - threshold) * share
        for (threshold, share), end in zip(tiers, bounds[1:], strict=True)
    )
    return shares + sum(float(row["fixed"]) for row in rows if row["above"] == ANY_SIZE)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, value) for name, _, value in (part.partition("=") for part in text.split(";") if part)
    )


@lru_cache(maxsize=8)
def _rows(name: str) -> list[dict[str, str]]:
    return load_rows(DATA / name)
