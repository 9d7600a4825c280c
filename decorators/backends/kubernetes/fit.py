"""Nodes of a cluster that could run a request, how to select them, and why other nodes could not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from decorators.backends.interface import ClusterFacts, MinimumRequest
from decorators.backends.kubernetes.offered import devices_of
from estimator import hardware
from estimator.formatting import format_bytes
from estimator.hardware.catalogue.parts import is_part
from estimator.hardware.cluster import ClusterNodes, tables
from estimator.hardware.cluster.machines import LABELS_OF_PARTS, group
from estimator.hardware.cluster.nodes import ARCH, DISK, EFA, HUGEPAGES, INSTANCE_TYPE, ZONE, Node, clouds_of
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.tables import PodResources, SpotLabel
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import MIB, Request

UNTOLERATED = "untolerated taint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Nodes that could run one of the run's pods, and reasons why the others could not."""

    names: tuple[str, ...]
    facts: ClusterFacts
    rejections: tuple[tuple[str, int], ...]  # (reason, number of nodes), most frequent first
    zones: tuple[tuple[str, int], ...]  # (zone, fitting nodes)
    clouds: frozenset[str]  # cloud providers of the nodes; empty: on premises
    blocking_taints: tuple[str, ...] = ()  # taints of nodes that would fit if the taints were tolerated


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    node: Node
    group: ClusterNodes | None  # None: the request needs no GPU
    tolerations: tuple[Toleration, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Criteria:
    """Requirements of one pod of the run on a node."""

    request: Request
    rules: PodRules
    minimum: MinimumRequest
    daemons: PodResources
    extended: tuple[tuple[str, float], ...]


def fit(
    nodes: Iterable[Node],
    request: Request,
    rules: PodRules,
    minimum: MinimumRequest | None = None,
    *,
    daemons: PodResources | None = None,
    extended: tuple[tuple[str, float], ...] = (),
) -> Fit:
    """Find the nodes that fit, ignoring the pods that run there now.

    ``daemons``: requests of daemon pods; None: values of the table. ``extended``: further resources that the
    user requests, by name.
    """
    all_nodes = tuple(nodes)
    criteria = _Criteria(
        request=request,
        rules=replace(rules, node_selector=(*rules.node_selector, *request.node_labels)),
        minimum=minimum or MinimumRequest(cpu=request.cpu, memory_bytes=request.memory_mib * MIB),
        daemons=daemons or tables.daemons(),
        extended=extended,
    )
    candidates: list[_Candidate] = []
    rejections: Counter[str] = Counter()
    blocking_taints: list[str] = []
    for node in all_nodes:
        verdict = _judge(node, criteria)
        if isinstance(verdict, _Candidate):
            candidates.append(verdict)
        else:
            rejections[verdict] += 1
            blocking_taints += [taint for taint in node.taints if verdict.startswith(UNTOLERATED)]
    candidates, spot = _with_common_spot_label(candidates, request)
    selected, labels = _by_selector(candidates, request)
    zones = Counter(item.node.labels[ZONE] for item in selected if ZONE in item.node.labels)
    one_zone = next((zone for zone, count in zones.most_common(1) if count >= request.nodes > 1), None)
    in_zone = [item for item in selected if one_zone in (None, item.node.labels.get(ZONE))]
    return Fit(
        names=tuple(item.node.name for item in selected),
        facts=replace(_facts(in_zone, labels, one_zone, criteria.daemons), spot=spot)
        if in_zone
        else ClusterFacts(),
        rejections=tuple(rejections.most_common()),
        zones=tuple(zones.most_common()),
        blocking_taints=tuple(dict.fromkeys(blocking_taints)),
        clouds=clouds_of(all_nodes),
    )


def _judge(node: Node, criteria: _Criteria) -> _Candidate | str:
    """Return the node as a candidate, or the reason why it does not fit."""
    request, rules = criteria.request, criteria.rules
    if reason := node.unavailable or rules.refuses(node.labels):
        return reason
    nodes_of_gpu: ClusterNodes | None = None
    if request.gpus_per_node:
        catalogue, gpu_type = hardware.current(), request.gpu_type
        assumed = gpu_type and (request.gpu_assumed or is_part(gpu_type))
        gpu = catalogue.gpu(gpu_type) if gpu_type and assumed else None
        cluster = group("", [node], catalogue, rules, user_gpu=gpu)
        if not cluster.nodes:
            return cluster.skipped[0].reason if cluster.skipped else "without GPUs"
        nodes_of_gpu = cluster.nodes[0]
        if request.gpu_type and nodes_of_gpu.gpu.name != hardware.current().gpu(request.gpu_type).name:
            return f"with {nodes_of_gpu.instance.gpu_count} {nodes_of_gpu.gpu.name}"
        if request.spot and not nodes_of_gpu.spot:
            return "not marked as spot nodes"
        if nodes_of_gpu.instance.gpu_count < request.gpus_per_node:
            return f"with only {nodes_of_gpu.instance.gpu_count} of {request.gpus_per_node} GPUs"
    return _sized(node, nodes_of_gpu, criteria)


def _sized(node: Node, group: ClusterNodes | None, criteria: _Criteria) -> _Candidate | str:
    pod_capacity, minimum, request = (
        _pod_resources(node, criteria.daemons),
        criteria.minimum,
        criteria.request,
    )
    if pod_capacity.cpu < minimum.cpu:
        return f"with {pod_capacity.cpu:g} of {minimum.cpu:g} CPUs"
    if pod_capacity.memory_bytes < minimum.memory_bytes:
        offered, needed = format_bytes(pod_capacity.memory_bytes), format_bytes(minimum.memory_bytes)
        return f"with {offered} of {needed} of memory"
    disk = node.allocatable.get(DISK)
    if disk is not None and disk < request.disk_mib * MIB:
        return f"with {format_bytes(disk)} of {format_bytes(request.disk_mib * MIB)} of disk"
    for name, count in criteria.extended:
        if node.allocatable.get(name, 0.0) < count:
            return f"with {node.allocatable.get(name, 0.0):g} of {count:g} {name}"
    used_tolerations, taint = criteria.rules.match_taints(node.taints, gpus=bool(request.gpus_per_node))
    if taint:
        return f"{UNTOLERATED} {taint[0]}"
    return _Candidate(node=node, group=group, tolerations=used_tolerations)


def _pod_resources(node: Node, daemons: PodResources) -> PodResources:
    """Return the resources available to one pod on a node besides its daemon pods."""
    return PodResources(
        cpu=node.allocatable.get("cpu", 0.0) - daemons.cpu,
        memory_bytes=int(node.allocatable.get("memory", 0.0)) - daemons.memory_bytes,
    )


def _with_common_spot_label(
    candidates: list[_Candidate], request: Request
) -> tuple[list[_Candidate], SpotLabel | None]:
    """Return the spot nodes with the most frequent spot label, and that label: a selector names one."""
    labels = Counter(tables.spot_label_on(item.node.labels) for item in candidates)
    if not request.spot or not labels:
        return candidates, None
    mark, _ = labels.most_common(1)[0]
    return [item for item in candidates if tables.spot_label_on(item.node.labels) == mark], mark


def _by_selector(
    candidates: list[_Candidate], request: Request
) -> tuple[list[_Candidate], tuple[tuple[str, str], ...] | None]:
    """Return the nodes matched by one selector (machine type or GPU), and that selector."""
    if not request.gpus_per_node:
        return candidates, None
    exact = [item for item in candidates if item.node.labels.get(INSTANCE_TYPE) == request.instance_type]
    if request.instance_type and exact and not is_part(request.gpu_type):
        return exact, ((INSTANCE_TYPE, request.instance_type),)
    selectors = Counter(selector for item in candidates for selector in _selectors(item))
    if not selectors:
        return candidates, None
    labels, _ = selectors.most_common(1)[0]
    return [item for item in candidates if labels in _selectors(item)], labels


def _selectors(item: _Candidate) -> list[tuple[tuple[str, str], ...]]:
    """Return label sets of the node that identify its GPU type, those of the table first."""
    node_labels = item.node.labels.items()
    if item.group is not None and is_part(item.group.gpu.name):  # no other labels distinguish its nodes
        named = tuple((key, value) for key, value in node_labels if key in LABELS_OF_PARTS)
        return [named or ((INSTANCE_TYPE, item.node.labels.get(INSTANCE_TYPE, "")),)]
    table_labels = [
        row.labels
        for row in tables.gpu_labels()
        if item.group is not None and row.gpu == item.group.gpu.name and set(row.labels) <= set(node_labels)
    ]
    if table_labels:
        return table_labels
    # A label value that only the GPU table lists, or a machine type other than the planned one
    keys = {row.labels[0][0] for row in tables.gpu_labels() if len(row.labels) == 1}
    keys.add(INSTANCE_TYPE)
    return [((key, value),) for key, value in node_labels if key in keys]


def archs_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the CPU architectures of nodes, by their labels."""
    return tuple(sorted({node.labels[ARCH] for node in nodes if ARCH in node.labels}))


def _facts(
    candidates: list[_Candidate],
    labels: tuple[tuple[str, str], ...] | None,
    zone: str | None,
    daemons: PodResources,
) -> ClusterFacts:
    capacities = [_pod_resources(item.node, daemons) for item in candidates]
    nodes = [item.node for item in candidates]
    return ClusterFacts(
        labels=labels,
        tolerations=tuple(dict.fromkeys(t for item in candidates for t in item.tolerations)),
        pod_capacity=PodResources(
            cpu=min(r.cpu for r in capacities), memory_bytes=min(r.memory_bytes for r in capacities)
        ),
        efa=min(int(node.allocatable.get(EFA, 0)) for node in nodes),
        hugepages_bytes=min(int(node.allocatable.get(HUGEPAGES, 0)) for node in nodes),
        zone=zone,
        devices=devices_of(nodes),
        arch=archs[0] if len(archs := archs_of(nodes)) == 1 else None,
    )
