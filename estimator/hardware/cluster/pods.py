"""Resource requests of pods: of daemon sets on every node of a kind, and of all pods on a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from estimator.hardware.cluster.api import Json, list_all
from estimator.hardware.cluster.nodes import GPUS, MIG, SHARED_GPUS, ZONE
from estimator.hardware.cluster.quantities import quantity
from estimator.hardware.cluster.quotas import QuotaPod
from estimator.hardware.cluster.tables import PodResources
from estimator.hardware.cluster.taints import Toleration, match_taints

SAMPLED_NODES = 4  # sample of the nodes that one selector matches, which are equal; one request each
_PERMANENT_OWNERS = (
    "DaemonSet",
    "Node",
)  # owners of pods that stay; static pods of the kubelet belong to the node
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRules:
    """Properties of a run's pods that nodes, NodePools and quotas check."""

    namespace: str = "default"
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    tolerate_gpu_taints: bool = True  # pods with GPUs also tolerate the taints that mark GPU nodes
    zone: str | None = None
    quota_pod: QuotaPod = field(default_factory=QuotaPod)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that a node must have, including the zone."""
        return {**dict(self.node_selector), **({ZONE: self.zone} if self.zone else {})}

    def refuses(self, labels: Mapping[str, str]) -> str | None:
        """Return the requirement that a node with these labels violates, or None."""
        missing = [(name, value) for name, value in self.labels.items() if labels.get(name) != value]
        for name, value in missing:
            return f"not in zone {value}" if name == ZONE else f"without the label {name}={value}"
        return None

    def match_taints(
        self, taints: Iterable[str], *, gpus: bool = True
    ) -> tuple[tuple[Toleration, ...], tuple[str, ...]]:
        """Return (tolerations of pods with or without GPUs, taints that they do not tolerate)."""
        return match_taints(taints, self.tolerations, tolerate_gpu_taints=self.tolerate_gpu_taints and gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Sum of the resource requests of the pods on one node."""

    gpus: int
    cpu: float
    memory_bytes: int
    holders: tuple[str, ...]  # namespace/name of pods with GPUs
    daemons: PodResources | None = None  # requests of the daemon pods among them; None: there are none


def allowed_usage(
    get: Callable[..., Json], may: Callable[..., bool], namespace: str
) -> tuple[dict[str, Usage] | None, bool]:
    """Return (usage of the nodes, whether it is complete), as far as this login may list pods.

    Only pods of the namespace if it may not list all; None if it may list none. Raises what ``get`` and
    ``may`` raise.
    """
    if may("list", "pods"):
        return read_usage(get), True
    return read_usage(get, namespace) if may("list", "pods", namespace=namespace) else None, False


def read_usage(
    get: Callable[..., Json], namespace: str | None = None, *, node: str | None = None
) -> dict[str, Usage]:
    """Return the usage of the nodes, by node; ``namespace`` and ``node`` restrict it.

    Raises what ``get`` raises.
    """
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    selector = f"spec.nodeName={node},{_RUNNING}" if node else _RUNNING
    pods: dict[str, list[Mapping[str, Any]]] = {}
    for pod in list_all(get, path, "PodList", fieldSelector=selector):
        if node := (pod.get("spec") or {}).get("nodeName"):
            pods.setdefault(node, []).append(pod)
    return {node: _usage(node_pods) for node, node_pods in pods.items()}


def _usage(pods: list[Mapping[str, Any]]) -> Usage:
    daemons = [pod for pod in pods if _is_permanent(pod)]
    requested = _requests_of(pods)
    return Usage(
        gpus=int(sum(map(_gpus_of, pods))),
        cpu=requested.cpu,
        memory_bytes=requested.memory_bytes,
        daemons=_requests_of(daemons) if daemons else None,
        holders=tuple(
            f"{pod['metadata'].get('namespace', 'default')}/{pod['metadata']['name']}"
            for pod in pods
            if _gpus_of(pod)
        ),
    )


def largest_daemon_requests(get: Callable[..., Json], nodes: Iterable[str]) -> PodResources | None:
    """Return the largest daemon-pod requests of the first ``SAMPLED_NODES`` nodes.

    None if one of them has no daemon pods (yet). Raises what ``get`` raises: few logins may read the pods of
    all namespaces.
    """
    names = tuple(nodes)[:SAMPLED_NODES]
    usages = [usage for name in names for usage in read_usage(get, node=name).values()]
    requests = [usage.daemons for usage in usages if usage.daemons is not None]
    if not requests or len(requests) < len(names):
        return None
    return PodResources(
        cpu=max(daemons.cpu for daemons in requests),
        memory_bytes=max(daemons.memory_bytes for daemons in requests),
    )


def _requests_of(pods: list[Mapping[str, Any]]) -> PodResources:
    return PodResources(
        cpu=sum(_request_of(pod, "cpu") for pod in pods),
        memory_bytes=int(sum(_request_of(pod, "memory") for pod in pods)),
    )


def _is_permanent(pod: Mapping[str, Any]) -> bool:
    owners = pod.get("metadata", {}).get("ownerReferences") or []
    return any(owner.get("kind") in _PERMANENT_OWNERS for owner in owners)


def _gpus_of(pod: Mapping[str, Any]) -> float:
    """Return the GPUs, MIG slices or replicas that a pod requests."""
    limits = (container.get("resources") or {} for container in pod["spec"].get("containers") or [])
    slices = {name for part in limits for name in part.get("requests") or {} if name.startswith(MIG)}
    return sum(_request_of(pod, name) for name in (GPUS, SHARED_GPUS, *slices))


def _request_of(pod: Mapping[str, Any], resource: str) -> float:
    """Return a pod's request as the scheduler counts it, with init containers, sidecars and overhead."""
    spec = pod["spec"]
    running = sum(_request(container, resource) for container in spec.get("containers") or [])
    peak = 0.0
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":  # a sidecar: runs together with all later containers
            running += _request(container, resource)
        else:
            peak = max(peak, _request(container, resource))
    return max(running, peak) + quantity((spec.get("overhead") or {}).get(resource) or 0)


def _request(container: Mapping[str, Any], resource: str) -> float:
    return quantity(((container.get("resources") or {}).get("requests") or {}).get(resource) or 0)
