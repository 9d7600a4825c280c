"""What pods ask for: those that every node of a kind runs, and all that use a node now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.hardware.cluster_api import Json, NoKubernetesError
from estimator.hardware.cluster_nodes import GPUS
from estimator.hardware.cluster_tables import Room
from estimator.hardware.quantities import quantity

ASKED_NODES = 4  # nodes that one selector finds are of one kind, and one question each is enough
_STAYING = ("DaemonSet", "Node")  # who owns them; the kubelet's own static pods belong to the node
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"
PAGE = 500  # pods in one answer, as kubectl asks for


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What the pods on one node ask for together."""

    gpus: int
    cpu: float
    memory_bytes: int
    holders: tuple[str, ...]  # namespace/name of the pods that have GPUs


def read_usage(get: Callable[..., Json], namespace: str | None = None) -> dict[str, Usage]:
    """By node, what runs there, asked page by page; of one namespace only where one is named.

    Raises what ``get`` raises.
    """
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    pods: dict[str, list[Mapping[str, Any]]] = {}
    page = {"limit": str(PAGE), "fieldSelector": _RUNNING}
    while True:
        answer = get(path, **page)
        if answer.get("kind") != "PodList":
            raise NoKubernetesError
        for pod in answer.get("items") or []:
            if node := (pod.get("spec") or {}).get("nodeName"):
                pods.setdefault(node, []).append(pod)
        token = (answer.get("metadata") or {}).get("continue")
        if not token:
            return {node: _usage(on_it) for node, on_it in pods.items()}
        page["continue"] = token


def _usage(pods: list[Mapping[str, Any]]) -> Usage:
    return Usage(
        gpus=int(sum(_request_of(pod, GPUS) for pod in pods)),
        cpu=sum(_request_of(pod, "cpu") for pod in pods),
        memory_bytes=int(sum(_request_of(pod, "memory") for pod in pods)),
        holders=tuple(
            f"{pod['metadata'].get('namespace', 'default')}/{pod['metadata']['name']}"
            for pod in pods
            if _request_of(pod, GPUS)
        ),
    )


def most_of(get: Callable[..., Json], nodes: Iterable[str]) -> Room | None:
    """The largest of the first few nodes' daemon pods; None where a node has none, as a new one.

    Raises what ``get`` raises: reading the pods of all namespaces is a right that few logins have.
    """
    asked = [_on(get, name) for name in tuple(nodes)[:ASKED_NODES]]
    if not asked or any(room is None for room in asked):
        return None
    rooms = [room for room in asked if room is not None]
    return Room(cpu=max(room.cpu for room in rooms), memory_bytes=max(room.memory_bytes for room in rooms))


def _on(get: Callable[..., Json], node: str) -> Room | None:
    answer = get("/api/v1/pods", fieldSelector=f"spec.nodeName={node},{_RUNNING}")
    pods = [pod for pod in answer.get("items") or [] if _stays(pod)]
    if not pods:
        return None
    return Room(
        cpu=sum(_request_of(pod, "cpu") for pod in pods),
        memory_bytes=int(sum(_request_of(pod, "memory") for pod in pods)),
    )


def _stays(pod: Mapping[str, Any]) -> bool:
    owners = pod.get("metadata", {}).get("ownerReferences") or []
    return any(owner.get("kind") in _STAYING for owner in owners)


def _request_of(pod: Mapping[str, Any], resource: str) -> float:
    """What a pod asks for, as the scheduler counts (Kubernetes: init and sidecar containers, overhead)."""
    spec = pod["spec"]
    running = sum(_asked(container, resource) for container in spec.get("containers") or [])
    most = 0.0
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":  # a sidecar: it stays beside all that come later
            running += _asked(container, resource)
        else:
            most = max(most, _asked(container, resource))
    return max(running, most) + _quantity((spec.get("overhead") or {}).get(resource))


def _asked(container: Mapping[str, Any], resource: str) -> float:
    return _quantity(((container.get("resources") or {}).get("requests") or {}).get(resource))


def _quantity(text: str | None) -> float:
    return quantity(text) if text else 0.0
