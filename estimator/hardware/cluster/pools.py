"""Sources of new nodes: Karpenter's NodePools and the cluster autoscaler's node groups.

A NodePool has rules for instance types, so each type of the table can be checked. Of a node group only name
and sizes can be read; its instance type is known from its present nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import ge, gt, le, lt
from typing import Any

from estimator import hardware
from estimator.hardware.catalogue import Instance
from estimator.hardware.cluster.api import Json, get_or_none
from estimator.hardware.cluster.nodes import GPUS, INSTANCE_TYPE
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.quantities import quantities
from estimator.hardware.cluster.tables import labels_of
from estimator.hardware.cluster.taints import Toleration, taint_text
from estimator.plan import MIB, Request
from estimator.untrusted import parse_yaml

KARPENTER = "karpenter.sh"
STATUS = {"namespace": "kube-system", "name": "cluster-autoscaler-status"}  # a ConfigMap
CAPACITY_TYPE = "karpenter.sh/capacity-type"
NODES = "nodes"  # name in the limits of Karpenter
_COMMANDS = {  # commands that show node groups, by cloud
    "aws": "eksctl get nodegroup --cluster NAME",
    "gcp": "gcloud container node-pools list --cluster NAME",
    "azure": "az aks nodepool list --resource-group GROUP --cluster-name NAME",
}
# Cloud of a NodePool, by the API group of its node class
_CLOUD_OF_CLASS = {
    "karpenter.k8s.aws": "aws",
    "eks.amazonaws.com": "aws",
    "karpenter.sagemaker.amazonaws.com": "aws",
    "karpenter.azure.com": "azure",
    "karpenter.k8s.gcp": "gcp",
}
_Test = Callable[[str, tuple[str, ...]], bool]
_OPERATORS: dict[str, _Test] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, values: True,  # noqa: ARG005
    "DoesNotExist": lambda value, values: False,  # noqa: ARG005
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {"Gt": gt, "Lt": lt, "Gte": ge, "Lte": le}
# Sizes of a group in the status text of cluster autoscalers before 1.30
_OLD_GROUP = re.compile(
    r"^\s*Name:\s*(\S+)\s*\n\s*Health:.*cloudProviderTarget=(\d+) \(minSize=\d+, maxSize=(\d+)\)",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePool:
    """NodePool of Karpenter. Amounts in cores, bytes and counts."""

    name: str
    cloud: str | None  # None: unknown node class
    labels: tuple[tuple[str, str], ...]
    requirements: tuple[tuple[str, str, tuple[str, ...]], ...]  # (label, operator, values)
    taints: tuple[str, ...]
    limits: tuple[tuple[str, float], ...]
    used: tuple[tuple[str, float], ...]  # part of the limits used by its nodes

    @property
    def spot(self) -> bool | None:
        """Whether it starts spot nodes; None if it may start both kinds."""
        allowed = [
            value
            for value in ("spot", "on-demand")
            if all(
                key != CAPACITY_TYPE or _passes(operator, value, values)
                for key, operator, values in self.requirements
            )
        ]
        return None if len(allowed) != 1 else allowed == ["spot"]

    def refuses(self, labels: Mapping[str, str]) -> str | None:
        """Return the rule that a node with these labels violates; None if no known rule does."""
        pool_labels = dict(self.labels)
        for key, value in labels.items():
            if pool_labels.get(key, value) != value:
                return f"{key} is {pool_labels[key]}"
        labels = {**labels, **pool_labels}
        for key, operator, values in self.requirements:
            if key in labels and not _passes(operator, labels[key], values):
                return f"{key} {operator} {', '.join(values[:4])}".rstrip()
        return None

    def machines_left(self, instance: Instance) -> int | None:
        """Return the number of further machines of this type within the limits; None without limits."""
        needs = {GPUS: instance.gpu_count, NODES: 1, "cpu": instance.vcpu, "memory": instance.ram_bytes}
        usage = dict(self.used)
        counts = [
            max(0, int((limit - usage.get(resource, 0.0)) // amount))
            for resource, limit in self.limits
            if (amount := needs.get(resource))
        ]
        return min(counts, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Node group of the cluster autoscaler."""

    name: str
    nodes: int  # target size
    max_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Autoscalers:
    """NodePools and node groups of a cluster, as far as they can be read."""

    pools: tuple[NodePool, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    karpenter: bool = False
    unknown: str = ""  # reason why node groups are unknown, as a clause; empty: they are known


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Whether nodes may be added; ``why``: reason, a clause for the table."""

    possible: bool
    why: str = ""
    command: str = ""
    tolerations: tuple[Toleration, ...] = ()  # of the taints of added nodes
    untolerated_taints: tuple[str, ...] = ()  # all taints of a pool that would fit except for its taints
    by_karpenter: bool = False


def read_autoscalers(get: Callable[..., Json], may: Callable[..., bool]) -> Autoscalers:
    """Read NodePools and node groups. Raises what ``get`` and ``may`` raise, except for missing objects.

    ``may``: function that returns whether this login has a permission.
    """
    karpenter = get_or_none(get, f"/apis/{KARPENTER}")
    pools: tuple[NodePool, ...] = ()
    if karpenter is not None:
        version = karpenter["preferredVersion"]["groupVersion"]
        pools = tuple(pool_of(item) for item in get(f"/apis/{version}/nodepools").get("items") or [])
    groups, unknown = _read_groups(get, may)
    return Autoscalers(pools=pools, groups=groups, karpenter=karpenter is not None, unknown=unknown)


def could_grow(autoscalers: Autoscalers, request: Request, clouds: frozenset[str], rules: PodRules) -> Growth:
    """Return whether nodes that fit a request could be added.

    ``clouds``: clouds of the present nodes, for the command that shows their node groups.
    """
    refusals = {pool.name: refusal(pool, request, rules) for pool in autoscalers.pools}
    for pool in autoscalers.pools:
        if refusals[pool.name] is None:
            tolerations, _ = rules.match_taints(pool.taints, gpus=bool(request.gpus_per_node))
            reason = f"Karpenter's NodePool {pool.name} may add them"
            return Growth(possible=True, why=reason, tolerations=tolerations, by_karpenter=True)
    group_growth = _by_groups(autoscalers, clouds)
    if not autoscalers.karpenter or (request.instance_type is None and group_growth.possible):
        return group_growth
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items()) or "it has none"
    tolerate_all = replace(rules, tolerations=(Toleration(key="", effect=""),))
    pool_taints = (pool.taints for pool in autoscalers.pools if refusal(pool, request, tolerate_all) is None)
    return Growth(
        possible=False,
        why=f"no NodePool of Karpenter's would add one ({reasons})",
        untolerated_taints=next(pool_taints, ()),
    )


def refusal(pool: NodePool, request: Request, rules: PodRules) -> str | None:
    """Return the reason why a NodePool would not start nodes for the request; None if it could."""
    instance = hardware.current().find_instance(request.instance_type)
    labels = machine_labels(instance, request.gpu_type) if instance is not None else {}
    labels |= rules.labels | dict(request.node_labels) | ({CAPACITY_TYPE: "spot"} if request.spot else {})
    if broken := pool.refuses(labels):
        return broken
    _, untolerated = rules.match_taints(pool.taints, gpus=bool(request.gpus_per_node))
    if untolerated:
        return f"its nodes have the taint {untolerated[0]}, which the pods do not tolerate"
    new_nodes = pool.machines_left(instance) if instance is not None else None
    if new_nodes is not None and new_nodes < request.nodes:
        limits = ", ".join(f"{resource} {amount:g}" for resource, amount in pool.limits)
        return f"its limits ({limits}) leave room for {new_nodes} of {request.nodes} {request.instance_type}"
    gpus, limit = request.nodes * request.gpus_per_node, dict(pool.limits).get(GPUS)
    available = None if limit is None else limit - dict(pool.used).get(GPUS, 0)
    if available is not None and gpus > available:
        return f"its limit leaves {available:g} GPUs, {gpus} are needed"
    return None


def pool_of(item: Mapping[str, Any]) -> NodePool:
    """Parse a NodePool of the API."""
    spec = item.get("spec") or {}
    template = spec.get("template") or {}
    node_spec = template.get("spec") or {}
    reference = node_spec.get("nodeClassRef") or {}
    group = reference.get("group") or str(reference.get("apiVersion") or "").partition("/")[0]
    return NodePool(
        name=item["metadata"]["name"],
        cloud=_CLOUD_OF_CLASS.get(group),
        labels=tuple(((template.get("metadata") or {}).get("labels") or {}).items()),
        requirements=tuple(
            (
                rule.get("key", ""),
                rule.get("operator", ""),
                tuple(str(value) for value in rule.get("values") or []),
            )
            for rule in node_spec.get("requirements") or []
        ),
        taints=tuple(taint_text(taint) for taint in node_spec.get("taints") or []),  # not startupTaints
        limits=tuple(quantities(spec.get("limits")).items()),
        used=tuple(quantities((item.get("status") or {}).get("resources")).items()),
    )


def machine_labels(instance: Instance, gpu: str | None = None) -> dict[str, str]:
    """Return the labels that Karpenter would give an instance type, as far as they are known.

    Names: karpenter.sh, "instance types" and "scheduling"; AKS, "node auto-provisioning: node pools".
    """
    labels = {
        INSTANCE_TYPE: instance.name,
        # Grace Hopper and Grace Blackwell (GH200, GB200) have Arm CPUs
        "kubernetes.io/arch": "arm64" if re.match(r"G[HB]\d", instance.gpu) else "amd64",
        "kubernetes.io/os": "linux",
    }
    sizes = {"cpu": instance.vcpu, "memory": instance.ram_bytes and instance.ram_bytes // MIB}
    if instance.cloud == "azure":
        labels |= {
            "karpenter.azure.com/sku-name": instance.name,
            "karpenter.azure.com/sku-family": instance.name.removeprefix("Standard_")[:1],
            "karpenter.azure.com/sku-gpu-count": str(instance.gpu_count),
            "karpenter.azure.com/sku-gpu-manufacturer": "nvidia",
        }
        labels |= {f"karpenter.azure.com/sku-{field}": str(size) for field, size in sizes.items() if size}
    if instance.cloud == "aws":
        family, _, size = instance.name.partition(".")
        generation = re.match(r"[a-z]+(\d+)", family)
        for prefix, scheme in (("karpenter.k8s.aws", "karpenter"), ("eks.amazonaws.com", "eks-auto")):
            labels |= {
                f"{prefix}/instance-family": family,
                f"{prefix}/instance-size": size,
                f"{prefix}/instance-category": re.split(r"\d", family)[0],  # "p" of p5en
                f"{prefix}/instance-gpu-count": str(instance.gpu_count),
                f"{prefix}/instance-gpu-manufacturer": "nvidia",
            }
            if generation is not None:
                labels[f"{prefix}/instance-generation"] = generation[1]
            labels |= {f"{prefix}/instance-{field}": str(size) for field, size in sizes.items() if size}
            for row in labels_of(gpu or instance.gpu, scheme)[:1]:
                labels |= dict(row.labels)
    return labels


def _passes(operator: str, value: str, values: tuple[str, ...]) -> bool:
    if operator in _COMPARISONS:
        try:
            return _COMPARISONS[operator](int(value), int(values[0]))
        except (ValueError, IndexError):  # Kubernetes compares integers; anything else matches nothing
            return False
    test = _OPERATORS.get(operator)
    return test is None or test(value, values)  # operators newer than this table are ignored


def _by_groups(autoscalers: Autoscalers, clouds: frozenset[str]) -> Growth:
    command = next((command for cloud, command in _COMMANDS.items() if cloud in clouds), "")
    growing = [
        f"{group.name} ({group.nodes} of {group.max_nodes} nodes)"
        for group in autoscalers.groups
        if group.nodes < group.max_nodes
    ]
    if growing:
        reason = f"the cluster autoscaler may add nodes to {', '.join(growing[:4])}"
        return Growth(possible=True, why=reason, command=command)
    if autoscalers.groups:
        reason = "all node groups of the cluster autoscaler have their largest size"
        return Growth(possible=False, why=reason, command=command)
    if autoscalers.unknown and clouds:
        reason = f"unknown whether a node group may add them: {autoscalers.unknown}"
        return Growth(possible=True, why=reason, command=command)
    return Growth(possible=False, why="no autoscaler found", command=command)


def _read_groups(get: Callable[..., Json], may: Callable[..., bool]) -> tuple[tuple[NodeGroup, ...], str]:
    """Return (node groups, reason why they are unknown); both empty without an autoscaler status."""
    import yaml

    if not may("get", "configmaps", **STATUS):
        return (), "this login may not read {namespace}/{name}".format(**STATUS)
    config_map = get_or_none(get, "/api/v1/namespaces/{namespace}/configmaps/{name}".format(**STATUS))
    if config_map is None:
        return (), ""
    data = config_map.get("data")
    text = str(data.get("status") or "") if isinstance(data, dict) else ""
    unreadable = "{namespace}/{name} is unreadable".format(**STATUS)
    try:
        content = parse_yaml(text)
    except yaml.YAMLError:
        content = None
    items = content.get("nodeGroups") if isinstance(content, dict) else None
    if items is not None and not (
        isinstance(items, list) and all(isinstance(entry, dict) for entry in items)
    ):
        return (), unreadable
    if items is None:
        old = tuple(
            _group(name, int(current), int(largest)) for name, current, largest in _OLD_GROUP.findall(text)
        )
        return old, "" if old else unreadable
    groups = []
    for item in items:
        health = item.get("health")
        if not isinstance(health, dict):
            return (), unreadable
        current, largest = (
            health.get("cloudProviderTarget", 0),
            health.get("maxSize"),
        )  # a target of 0 is omitted
        if isinstance(current, int) and isinstance(largest, int):
            groups.append(_group(str(item.get("name", "")), current, largest))
    return tuple(groups), "" if groups or not items else unreadable


def _group(name: str, nodes: int, max_nodes: int) -> NodeGroup:
    return NodeGroup(name=name.rpartition("/")[2], nodes=nodes, max_nodes=max_nodes)
