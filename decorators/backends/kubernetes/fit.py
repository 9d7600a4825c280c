"""Nodes of a cluster that could take a request, how to select them, and why others could not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from decorators.backends.interface import ClusterFacts, MinimumRequest
from decorators.backends.kubernetes.offered import devices_of
from estimator import hardware
from estimator.formatting import format_bytes
from estimator.hardware.cluster import ClusterNodes, tables
from estimator.hardware.cluster.machines import group
from estimator.hardware.cluster.nodes import DISK, EFA, HUGEPAGES, INSTANCE_TYPE, ZONE, Node, clouds_of
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.tables import Room, SpotLabel
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import MIB, Request

FENCED = "untolerated taint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The nodes that could take one of the run's pods, and in words what the others lack."""

    names: tuple[str, ...]
    facts: ClusterFacts
    lacks: tuple[tuple[str, int], ...]  # (what is wrong, nodes), the most frequent first
    zones: tuple[tuple[str, int], ...]  # (zone, fitting nodes)
    clouds: frozenset[str]  # whose nodes there are; empty: on premises
    fences: tuple[str, ...] = ()  # all taints of the nodes that only taints keep out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    node: Node
    group: ClusterNodes | None  # None: the request needs no GPU
    tolerations: tuple[Toleration, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Criteria:
    """Requirements of one of the run's pods on a node."""

    request: Request
    rules: PodRules
    minimum: MinimumRequest
    daemons: Room
    extended: tuple[tuple[str, float], ...]


def fit(
    nodes: Iterable[Node],
    request: Request,
    rules: PodRules,
    minimum: MinimumRequest | None = None,
    *,
    daemons: Room | None = None,
    extended: tuple[tuple[str, float], ...] = (),
) -> Fit:
    """Judge each node by itself, before the pods that run there now.

    ``daemons``: what daemon pods ask for; None: what the table says. ``extended``: further resources that the
    user asks for, by name.
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
    lacks: Counter[str] = Counter()
    fences: list[str] = []
    for node in all_nodes:
        judged = _judge(node, criteria)
        if isinstance(judged, _Candidate):
            candidates.append(judged)
        else:
            lacks[judged] += 1
            fences += [taint for taint in node.taints if judged.startswith(FENCED)]
    candidates, spot = _marked_alike(candidates, request)
    kept, labels = _found_by(candidates, request)
    zones = Counter(item.node.labels[ZONE] for item in kept if ZONE in item.node.labels)
    together = next((zone for zone, count in zones.most_common(1) if count >= request.nodes > 1), None)
    inside = [item for item in kept if together in (None, item.node.labels.get(ZONE))]
    return Fit(
        names=tuple(item.node.name for item in kept),
        facts=replace(_facts(inside, labels, together, criteria.daemons), spot=spot)
        if inside
        else ClusterFacts(),
        lacks=tuple(lacks.most_common()),
        zones=tuple(zones.most_common()),
        fences=tuple(dict.fromkeys(fences)),
        clouds=clouds_of(all_nodes),
    )


def _judge(node: Node, criteria: _Criteria) -> _Candidate | str:
    """The node as a candidate, or what is wrong with it."""
    request, rules = criteria.request, criteria.rules
    if reason := node.unavailable or rules.refuses(node.labels):
        return reason
    one: ClusterNodes | None = None
    if request.gpus_per_node:
        catalogue, kind = hardware.current(), request.gpu_type
        named = catalogue.gpu(kind) if kind and request.gpu_on_trust else None
        cluster = group("", [node], catalogue, rules, named=named)
        if not cluster.nodes:
            return cluster.aside[0].reason if cluster.aside else "without GPUs"
        one = cluster.nodes[0]
        if request.gpu_type and one.gpu.name != hardware.current().gpu(request.gpu_type).name:
            return f"with {one.instance.gpu_count} {one.gpu.name}"
        if request.spot and not one.spot:
            return "not marked as spot nodes"
        if one.instance.gpu_count < request.gpus_per_node:
            return f"with only {one.instance.gpu_count} of {request.gpus_per_node} GPUs"
    return _sized(node, one, criteria)


def _sized(node: Node, one: ClusterNodes | None, criteria: _Criteria) -> _Candidate | str:
    room, minimum, request = _room(node, criteria.daemons), criteria.minimum, criteria.request
    if room.cpu < minimum.cpu:
        return f"with {room.cpu:g} of {minimum.cpu:g} CPUs"
    if room.memory_bytes < minimum.memory_bytes:
        return f"with {format_bytes(room.memory_bytes)} of {format_bytes(minimum.memory_bytes)} of memory"
    disk = node.allocatable.get(DISK)
    if disk is not None and disk < request.disk_mib * MIB:
        return f"with {format_bytes(disk)} of {format_bytes(request.disk_mib * MIB)} of disk"
    for name, count in criteria.extended:
        if node.allocatable.get(name, 0.0) < count:
            return f"with {node.allocatable.get(name, 0.0):g} of {count:g} {name}"
    needed, closed = criteria.rules.fence(node.taints, gpus=bool(request.gpus_per_node))
    if closed:
        return f"{FENCED} {closed[0]}"
    return _Candidate(node=node, group=one, tolerations=needed)


def _room(node: Node, daemons: Room) -> Room:
    """Return the resources that one pod can use on a node next to its daemon pods."""
    return Room(
        cpu=node.allocatable.get("cpu", 0.0) - daemons.cpu,
        memory_bytes=int(node.allocatable.get("memory", 0.0)) - daemons.memory_bytes,
    )


def _marked_alike(
    candidates: list[_Candidate], request: Request
) -> tuple[list[_Candidate], SpotLabel | None]:
    """Return the spot nodes with the most frequent label, as a selector names one, and that label."""
    marks = Counter(tables.spot_label_on(item.node.labels) for item in candidates)
    if not request.spot or not marks:
        return candidates, None
    mark, _ = marks.most_common(1)[0]
    return [item for item in candidates if tables.spot_label_on(item.node.labels) == mark], mark


def _found_by(
    candidates: list[_Candidate], request: Request
) -> tuple[list[_Candidate], tuple[tuple[str, str], ...] | None]:
    """The nodes that one selector finds, and that selector: the planned machine's, else the GPU's."""
    if not request.gpus_per_node:
        return candidates, None
    exact = [item for item in candidates if item.node.labels.get(INSTANCE_TYPE) == request.instance_type]
    if request.instance_type and exact:
        return exact, ((INSTANCE_TYPE, request.instance_type),)
    selectors = Counter(selector for item in candidates for selector in _selectors(item))
    if not selectors:
        return candidates, None
    labels, _ = selectors.most_common(1)[0]
    return [item for item in candidates if labels in _selectors(item)], labels


def _selectors(item: _Candidate) -> list[tuple[tuple[str, str], ...]]:
    """Labels of the node by which its GPU type is told, the table's first."""
    had = item.node.labels.items()
    known = [
        row.labels
        for row in tables.gpu_labels()
        if item.group is not None and row.gpu == item.group.gpu.name and set(row.labels) <= set(had)
    ]
    if known:
        return known
    # A spelling that only the GPU table knows, or a machine type that is not the planned one
    keys = {row.labels[0][0] for row in tables.gpu_labels() if len(row.labels) == 1}
    keys.add(INSTANCE_TYPE)
    return [((key, value),) for key, value in had if key in keys]


def _facts(
    candidates: list[_Candidate],
    labels: tuple[tuple[str, str], ...] | None,
    zone: str | None,
    daemons: Room,
) -> ClusterFacts:
    rooms = [_room(item.node, daemons) for item in candidates]
    nodes = [item.node for item in candidates]
    return ClusterFacts(
        labels=labels,
        tolerations=tuple(dict.fromkeys(t for item in candidates for t in item.tolerations)),
        room=Room(cpu=min(r.cpu for r in rooms), memory_bytes=min(r.memory_bytes for r in rooms)),
        efa=min(int(node.allocatable.get(EFA, 0)) for node in nodes),
        hugepages_bytes=min(int(node.allocatable.get(HUGEPAGES, 0)) for node in nodes),
        zone=zone,
        devices=devices_of(nodes),
    )
