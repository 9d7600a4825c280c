"""The tables next to this file: fabrics, variables, labels of topology, quotas, releases."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from estimator.hardware import Instance

DATA = Path(__file__).with_name("data")
ANY = "any"  # of a variable: whatever the fabric, on every backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """A network for GPUs' traffic, and whether Metaflow can ask for it."""

    name: str
    asked_for: bool
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """An environment variable of the containers of a step on several nodes."""

    fabric: str  # a name of the table of fabrics, or ANY
    backend: str  # "kubernetes", "batch", or ANY
    name: str
    value: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A label by which nodes that share its value are near each other."""

    label: str
    weight: int  # next to the others', 1 to 100
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFabric:
    """Requirements of pods for one fabric on Kubernetes (pod_fabrics.yaml explains the fields)."""

    fabric: Literal["efa", "infiniband", "roce", "tcpx"]
    resource: str
    count: Literal["all", "shared", "none"]
    network: Literal["host", "multus", "gke"]
    patch: dict[str, Any]
    source: str
    first_interface: int = 1
    machine: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """A limit of AWS's on the vCPUs that an account may run at a time."""

    family: str  # how names of its machines begin
    spot: bool
    code: str  # of Service Quotas, service ec2; empty: not known
    name: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Component that a cluster needs, at the version that infra/ is made for."""

    name: str
    version: str
    manifest: str  # an address for kubectl apply
    source: str


@lru_cache(maxsize=1)
def fabrics() -> tuple[Fabric, ...]:
    return tuple(
        Fabric(
            name=row["fabric"],
            asked_for=row["asked_for"] == "yes",
            why=row["why"],
            source=row["source"],
        )
        for row in _rows("fabrics.csv")
    )


def fabric_of(instance: Instance | None) -> Fabric | None:
    """The machine's fast fabric by the instance table's column; None where it has none, or is not known."""
    text = instance.fabric if instance is not None else ""
    return next((fabric for fabric in fabrics() if re.search(rf"\b{fabric.name}\b", text)), None)


@lru_cache(maxsize=1)
def variables() -> tuple[Variable, ...]:
    return tuple(
        Variable(
            fabric=row["fabric"],
            backend=row["backend"],
            name=row["variable"],
            value=row["value"],
            why=row["why"],
            source=row["source"],
        )
        for row in _rows("environment.csv")
    )


def environment(backend: str, fabric: str | None) -> dict[str, str]:
    """Variables for a step on several nodes whose containers have that fabric; None: none that is known."""
    return {
        row.name: row.value
        for row in variables()
        if row.fabric in (ANY, fabric) and row.backend in (ANY, backend)
    }


@lru_cache(maxsize=1)
def topology() -> tuple[Level, ...]:
    """The labels of clouds and of NVIDIA's discovery that tell where a Kubernetes node is."""
    return tuple(
        Level(label=row["label"], weight=int(row["weight"]), source=row["source"])
        for row in _rows("topology.csv")
    )


@lru_cache(maxsize=1)
def pod_fabrics() -> tuple[PodFabric, ...]:
    """In the order in which ``auto`` looks for them."""
    rows = yaml.safe_load((DATA / "pod_fabrics.yaml").read_text(encoding="utf-8"))
    return tuple(PodFabric(**{name: value for name, value in row.items() if name != "date"}) for row in rows)


@lru_cache(maxsize=1)
def merge_keys() -> dict[str, str]:
    """Lists of a pod's template that a patch is merged into item by item: the key that tells items apart."""
    return {row["list"]: row["key"] for row in _rows("merge_keys.csv")}


@lru_cache(maxsize=1)
def disruptions() -> dict[str, str]:
    """Reasons that a pod's status gives where its node has taken it away, each in words."""
    return {row["reason"]: row["words"] for row in _rows("disruptions.csv")}


def quotas_of(instance_type: str, *, spot: bool) -> list[Quota]:
    """The limits that may count a machine of AWS's, that of the narrowest family first."""
    named = re.match(r"([a-z]+)\d+", instance_type)
    families = (named[0], named[1]) if named else ()  # "p5en.48xlarge": p5, p
    quotas = [
        Quota(
            family=row["family"],
            spot=row["market"] == "spot",
            code=row["code"],
            name=row["name"],
            source=row["source"],
        )
        for row in _rows("quotas.csv")
        if row["family"] in families
    ]
    return sorted((row for row in quotas if row.spot == spot), key=lambda row: -len(row.family))


def release(name: str) -> Release:
    """Raises KeyError for a name that the table lacks."""
    for row in _rows("releases.csv"):
        if row["name"] == name:
            return Release(name=name, version=row["version"], manifest=row["manifest"], source=row["source"])
    raise KeyError(name)


def efa_interfaces(instance: Instance | None) -> int:
    """EFA interfaces of a machine ("EFA x32" in the instance table); 0 where it has none."""
    match = re.search(r"\bEFA x(\d+)", instance.fabric if instance is not None else "")
    return int(match[1]) if match else 0


@lru_cache(maxsize=8)
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
