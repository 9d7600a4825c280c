"""Nodes of a Kubernetes cluster, with one-line errors for failed requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.hardware.cluster.api import (
    ApiRefusedError,
    ClusterApi,
    Json,
    UnreachableError,
    api_error,
    list_all,
)
from estimator.hardware.cluster.quantities import quantities
from estimator.hardware.cluster.taints import taint_text, temporary_state
from estimator.untrusted import parse_json

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
ARCH = "kubernetes.io/arch"
GPUS, EFA, HUGEPAGES = "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"
MIG = "nvidia.com/mig-"
SHARED_GPUS = "nvidia.com/gpu.shared"  # name of replicas if the device plugin renames them
HAMI = "hami.io/node-nvidia-register"  # annotation: physical GPUs of a node whose GPUs HAMi shares
DISK = "ephemeral-storage"
CLOUDS = {"aws": "aws", "gce": "gcp", "azure": "azure"}  # by the scheme of a node's providerID
NODES = ("/api/v1/nodes", "NodeList")
RULE = 'apiGroups: [""], resources: ["nodes"], verbs: ["list"], in a ClusterRole'
# Taints that Kubernetes sets for the condition Ready and for spec.unschedulable, which are read directly
_READ_DIRECTLY = tuple(
    f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable", "unschedulable")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node as reported by the API. Resources in cores, bytes and counts, by name."""

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, float]
    capacity: Mapping[str, float]
    ready: bool
    unschedulable: bool
    taints: tuple[str, ...]
    cloud: str | None  # by its provider's scheme; None: on premises
    # Physical GPUs and their least memory in MiB where HAMi shares them; (0, 0): unreadable
    hami: tuple[int, int] | None = None

    @property
    def unavailable(self) -> str | None:
        """Reason why the node accepts no pods now; None if it does."""
        if not self.ready or self.unschedulable:
            return "unschedulable (cordoned)" if self.ready else "not Ready"
        return next(filter(None, map(temporary_state, self.taints)), None)


def fetch(context: str | None = None) -> tuple[str, list[Node]]:
    """Return the context's name and the nodes. Raises UserError within seconds if they cannot be read."""
    with ClusterApi(context, purpose="--from-cluster") as api:
        return api.context, fetch_nodes(api)


def fetch_nodes(api: ClusterApi) -> list[Node]:
    """Return the nodes of the cluster. Raises UserError if they cannot be read."""
    try:
        return read_nodes(api.get)
    except (ApiRefusedError, UnreachableError) as error:
        raise api_error(error, api.server, permission=RULE) from None


def read_nodes(get: Callable[..., Json]) -> list[Node]:
    """Read all nodes. Raises what ``get`` raises."""
    return [node_of(item) for item in list_all(get, *NODES)]


def node_of(item: Any) -> Node:
    """Parse a node of the API."""
    metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    taints = [taint for taint in spec.get("taints") or [] if taint["key"] not in _READ_DIRECTLY]
    return Node(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        allocatable=quantities(status.get("allocatable")),
        capacity=quantities(status.get("capacity")),
        ready=any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or []
        ),
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(taint_text(taint) for taint in taints),
        cloud=CLOUDS.get(str(spec.get("providerID") or "").partition(":")[0]),
        hami=hami_gpus((metadata.get("annotations") or {}).get(HAMI)),
    )


def hami_gpus(text: str | None) -> tuple[int, int] | None:
    """Return (physical GPUs, least memory in MiB) of HAMi's annotation, which is JSON since HAMi 2.6."""
    if text is None:
        return None
    try:
        if text.lstrip().startswith("["):
            sizes = [int(device["devmem"]) for device in parse_json(text)]
        else:  # "UUID,replicas,MiB,cores,type,NUMA node,health:" for each GPU
            sizes = [int(device.split(",")[2]) for device in text.split(":") if device.strip()]
    except (ValueError, LookupError, TypeError, OverflowError):
        return 0, 0
    return len(sizes), min(sizes, default=0)


def clouds_of(nodes: Iterable[Node]) -> frozenset[str]:
    """Return the clouds of the nodes; empty if all are on premises."""
    return frozenset(node.cloud for node in nodes if node.cloud)
