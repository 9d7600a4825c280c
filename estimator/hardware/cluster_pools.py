"""Could nodes be added that would take a request? Karpenter says so itself, node groups only how many."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator import hardware
from estimator.hardware import Instance
from estimator.hardware.cluster_api import Json, found_at
from estimator.hardware.cluster_tables import labels_of
from estimator.plan import Request

KARPENTER = "karpenter.sh"
STATUS = {"namespace": "kube-system", "name": "cluster-autoscaler-status"}  # a ConfigMap
_COMMANDS = {  # a node's providerID: what shows its node groups
    "aws": "eksctl get nodegroup --cluster NAME",
    "gce": "gcloud container node-pools list --cluster NAME",
    "azure": "az aks nodepool list --resource-group GROUP --cluster-name NAME",
}
_Test = Callable[[str, list[str]], bool]
_OPERATORS: dict[str, _Test] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Gt": lambda value, values: float(value) > float(values[0]),
    "Lt": lambda value, values: float(value) < float(values[0]),
    "Gte": lambda value, values: float(value) >= float(values[0]),
    "Lte": lambda value, values: float(value) <= float(values[0]),
    "Exists": lambda value, values: True,  # noqa: ARG005
    "DoesNotExist": lambda value, values: False,  # noqa: ARG005
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Whether such nodes may come; ``why`` is a clause for the table."""

    possible: bool
    why: str = ""
    command: str = ""


def could_grow(
    get: Callable[..., Json], may: Callable[..., bool], request: Request, clouds: frozenset[str]
) -> Growth:
    """Ask the cluster. Raises what ``get`` and ``may`` raise, but for what is not there.

    ``may``: whether this login has a right. ``clouds``: those of the present nodes, whose node groups may
    grow without the cluster knowing.
    """
    karpenter = found_at(get, f"/apis/{KARPENTER}")
    if karpenter is None:
        return _node_groups(get, may, clouds)
    version = karpenter["preferredVersion"]["groupVersion"]
    pools = get(f"/apis/{version}/nodepools").get("items") or []
    refusals = {pool["metadata"]["name"]: refusal(pool, request) for pool in pools}
    taking = [name for name, why in refusals.items() if why is None]
    if taking:
        return Growth(possible=True, why=f"Karpenter's NodePool {taking[0]} may add them")
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items()) or "it has none"
    if request.instance_type is None and (grown := _node_groups(get, may, clouds)).possible:
        return grown
    return Growth(possible=False, why=f"no NodePool of Karpenter's would add one ({reasons})")


def _node_groups(get: Callable[..., Json], may: Callable[..., bool], clouds: frozenset[str]) -> Growth:
    command = next((command for cloud, command in _COMMANDS.items() if cloud in clouds), "")
    groups = _autoscaler_groups(get) if may("get", "configmaps", **STATUS) else []
    growing = [f"{name} ({now} of {most} nodes)" for name, now, most in groups if now < most]
    if growing:
        why = f"the cluster autoscaler may add nodes to {', '.join(growing[:4])}"
        return Growth(possible=True, why=why, command=command)
    if groups:
        # Others may grow without the autoscaler: by hand, or by a cloud's own service
        why = "all node groups of the cluster autoscaler have their largest size"
        return Growth(possible=bool(command), why=why, command=command)
    return Growth(possible=bool(command), why="a node group may add them" if command else "", command=command)


def _autoscaler_groups(get: Callable[..., Json]) -> list[tuple[str, int, int]]:
    """(name, nodes that it should have now, its largest size); none where that isn't told."""
    import yaml

    try:
        path = "/api/v1/namespaces/{namespace}/configmaps/{name}".format(**STATUS)
        content = yaml.safe_load((found_at(get, path) or {}).get("data", {}).get("status", ""))
    except yaml.YAMLError:  # before 1.30 it is a text for people
        return []
    groups = content.get("nodeGroups") if isinstance(content, dict) else None
    sizes = []
    for group in groups or []:
        health = group.get("health") or {}
        now, most = health.get("cloudProviderTarget", 0), health.get("maxSize")  # a target of 0 is left out
        if isinstance(now, int) and isinstance(most, int):
            sizes.append((str(group.get("name", "")).rpartition("/")[2], now, most))
    return sizes


def refusal(pool: Mapping[str, Any], request: Request) -> str | None:
    """Why a NodePool would not start a node for the request, in words; None: it could."""
    template = pool.get("spec", {}).get("template", {})
    labels = _labels_of(_machine_of(request), request)
    labels |= dict(template.get("metadata", {}).get("labels") or {})
    for name, value in request.node_labels:
        if name in labels and labels[name] != value:
            return f"{name} is {labels[name]}"
    for item in template.get("spec", {}).get("requirements") or []:
        key, values = item.get("key", ""), [str(value) for value in item.get("values") or []]
        test = _OPERATORS.get(item.get("operator", ""))
        if key in labels and test is not None and not test(labels[key], values):
            return f"{key} {item.get('operator')} {', '.join(values[:4])}"
    limit = (pool.get("spec", {}).get("limits") or {}).get("nvidia.com/gpu")
    gpus = request.nodes * request.gpus_per_node
    if limit is not None and gpus > int(limit):
        return f"its limit is {limit} GPUs, {gpus} are needed"
    return None


def _machine_of(request: Request) -> Instance | None:
    return hardware.current().find_instance(request.instance_type) if request.instance_type else None


def _labels_of(instance: Instance | None, request: Request) -> dict[str, str]:
    """The labels that Karpenter would give the planned machine, as far as they are known."""
    if instance is None:
        return {}
    family = instance.name.split(".")[0]
    known = {
        "node.kubernetes.io/instance-type": instance.name,
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
    }
    if instance.cloud == "aws":
        for prefix, scheme in (("karpenter.k8s.aws", "karpenter"), ("eks.amazonaws.com", "eks-auto")):
            known |= {
                f"{prefix}/instance-family": family,
                f"{prefix}/instance-category": re.split(r"\d", family)[0],  # "p" of p5en
                f"{prefix}/instance-gpu-count": str(instance.gpu_count),
                f"{prefix}/instance-gpu-manufacturer": "nvidia",
            }
            for row in labels_of(request.gpu or instance.gpu, scheme)[:1]:
                known |= dict(row.labels)
    return known
