"""Tables in ``data/``: fabrics, environment variables, topology labels, quotas, releases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from estimator.data import load_rows, parse_row
from estimator.hardware import Instance

DATA = Path(__file__).with_name("data")
ANY = "any"  # value of a variable's fabric or backend: applies to all


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """A network for GPU traffic, and whether Metaflow can request it."""

    name: str
    requestable: bool
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """An environment variable for the containers of a multi-node step."""

    fabric: str  # name in the table of fabrics, or ANY
    backend: str  # "kubernetes", "batch", or ANY
    name: str
    value: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A topology level: nodes with the same value of the label are close to each other."""

    label: str
    weight: int  # preference relative to other levels, 1 to 100
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFabric:
    """Requirements of pods for one fabric on Kubernetes (pod_fabrics.yaml explains the fields)."""

    fabric: Literal["efa", "infiniband", "roce", "tcpx", "tcpxo"]
    resource: str
    count: Literal["all", "shared", "none"]
    network: Literal["host", "multus", "gke"]
    patch: dict[str, Any]
    source: str
    first_interface: int = 1
    machine: str | None = None
    plugin: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """An AWS limit on the vCPUs that an account may run at a time."""

    family: str  # prefix of the machine types
    spot: bool
    source: str
    code: str = ""  # quota code in Service Quotas, service ec2; empty if unknown
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Component that a cluster needs, in the version that infra/ is written for."""

    name: str
    version: str
    manifest: str  # URL for kubectl apply
    source: str


@lru_cache(maxsize=1)
def fabrics() -> tuple[Fabric, ...]:
    return tuple(
        Fabric(
            name=row["fabric"], requestable=row["requestable"] == "yes", why=row["why"], source=row["source"]
        )
        for row in _rows("fabrics.csv")
    )


def fabric_of(instance: Instance | None) -> Fabric | None:
    """Return the machine's fast fabric from the instance table; None if it has none or is unknown."""
    text = instance.fabric if instance is not None else ""
    return next((fabric for fabric in fabrics() if re.search(rf"\b{fabric.name}\b", text)), None)


@lru_cache(maxsize=1)
def variables() -> tuple[Variable, ...]:
    return tuple(
        Variable(name=row["variable"], **parse_row(Variable, row)) for row in _rows("environment.csv")
    )


def environment(backend: str, fabric: str | None) -> dict[str, str]:
    """Return the variables for a multi-node step whose containers use the fabric; None: no known fabric."""
    return {
        row.name: row.value
        for row in variables()
        if row.fabric in (ANY, fabric) and row.backend in (ANY, backend)
    }


@lru_cache(maxsize=1)
def topology() -> tuple[Level, ...]:
    """Return the labels of clouds and of NVIDIA's topology discovery that locate a Kubernetes node."""
    return tuple(Level(**parse_row(Level, row)) for row in _rows("topology.csv"))


@lru_cache(maxsize=1)
def pod_fabrics() -> tuple[PodFabric, ...]:
    """Return the fabrics in the order in which ``auto`` tries them."""
    rows = yaml.safe_load((DATA / "pod_fabrics.yaml").read_text(encoding="utf-8"))
    return tuple(PodFabric(**{name: value for name, value in row.items() if name != "date"}) for row in rows)


@lru_cache(maxsize=1)
def merge_keys() -> dict[str, str]:
    """Return the merge key of each list in a pod template that is merged item by item."""
    return {row["list"]: row["key"] for row in _rows("merge_keys.csv")}


@lru_cache(maxsize=1)
def disruptions() -> dict[str, str]:
    """Return descriptions of the reasons in a pod's status when its node ended it."""
    return {row["reason"]: row["words"] for row in _rows("disruptions.csv")}


def quotas_of(instance_type: str, *, spot: bool) -> list[Quota]:
    """Return the limits that may apply to an AWS machine type, the most specific family first."""
    match = re.match(r"([a-z]+)\d+", instance_type)
    families = (match[0], match[1]) if match else ()  # "p5en.48xlarge": p5, p
    quotas = [
        Quota(spot=row["market"] == "spot", **parse_row(Quota, row))
        for row in _rows("quotas.csv")
        if row["family"] in families
    ]
    return sorted((row for row in quotas if row.spot == spot), key=lambda row: -len(row.family))


def release(name: str) -> Release:
    """Return a component by name. Raises KeyError for an unknown name."""
    for row in _rows("releases.csv"):
        if row["name"] == name:
            return Release(**parse_row(Release, row))
    raise KeyError(name)


def efa_interfaces(instance: Instance | None) -> int:
    """Return the EFA interfaces of a machine ("EFA x32" in the instance table); 0 if it has none."""
    match = re.search(r"\bEFA x(\d+)", instance.fabric if instance is not None else "")
    return int(match[1]) if match else 0


@lru_cache(maxsize=8)
def _rows(name: str) -> list[dict[str, str]]:
    return load_rows(DATA / name)
