"""Capacity of a Kubernetes cluster for a run: nodes with free resources, possible new nodes, quotas.

Shared by ``finetune plan --from-cluster``, ``finetune gpus --from-cluster`` and runs. The nodes must be
readable; other facts that are not are reported, and assumed not to limit the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from estimator import hardware
from estimator.hardware.catalogue import Catalogue, Gpu, Instance
from estimator.hardware.cluster import Cluster, ClusterNodes, pods, tables
from estimator.hardware.cluster.api import ApiRefusedError, Clock, ClusterApi, UnreachableError
from estimator.hardware.cluster.machines import group
from estimator.hardware.cluster.nodes import Node, clouds_of, fetch_nodes
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.pools import (
    Autoscalers,
    NodeGroup,
    NodePool,
    machine_labels,
    read_autoscalers,
)
from estimator.hardware.cluster.quotas import Quota, read_quotas

PLANNING_S = 10.0  # for all requests before a plan
# Labels with the node group of a node: GKE, EKS, eksctl, AKS
GROUP_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "alpha.eksctl.io/nodegroup-name",
    "kubernetes.azure.com/agentpool",
    "agentpool",
)
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class _Reading:
    """Requests to one cluster; facts that cannot be read are recorded, one clause each."""

    api: ClusterApi
    unknown: list[str] = field(default_factory=list)

    def optional(self, name: str, query: Callable[[], T], default: T) -> T:
        try:
            return query()
        except (ApiRefusedError, UnreachableError, KeyError) as error:
            self.unknown.append(f"{name} ({error})")
            return default

    def usage(self, namespace: str) -> dict[str, pods.Usage] | None:
        """Return the usage of the nodes, of the namespace only if no more is visible; None if nothing is."""
        usage, complete = pods.allowed_usage(self.api.get, self.api.may, namespace)
        if not complete:
            self.unknown.append("usage by other namespaces (this login may list its own pods only)")
        return usage


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    """State of a cluster as its API reports it."""

    context: str
    nodes: tuple[Node, ...]
    usage: Mapping[str, pods.Usage] | None = None  # by node; None: unknown
    autoscalers: Autoscalers = field(default_factory=Autoscalers)
    quotas: tuple[Quota, ...] = ()
    unknown: tuple[str, ...] = ()  # facts that could not be read, as clauses


def read_cluster(
    context: str | None = None,
    *,
    catalogue: Catalogue | None = None,
    rules: PodRules | None = None,
    gpu: str | None = None,
) -> Cluster:
    """Read the cluster of a kubeconfig context (default: the current one; in a pod, its own cluster).

    ``gpu``: GPU of nodes without a GPU label, named by the user.

    Raises UserError within seconds if the cluster cannot be found, reached or read.
    """
    rules = rules or PodRules()
    return cluster_capacity(fetch(context, rules), catalogue or hardware.current(), rules, gpu=gpu)


def fetch(context: str | None, rules: PodRules) -> ClusterState:
    """Send all requests to the cluster, within PLANNING_S. Raises UserError if its nodes cannot be read."""
    namespace = rules.namespace
    clock = Clock(overall_s=PLANNING_S)
    with ClusterApi(context, purpose="Planning for a cluster", clock=clock) as api:
        reading = _Reading(api=api)
        return ClusterState(
            context=api.context,
            nodes=tuple(fetch_nodes(api)),
            usage=reading.optional("usage of the nodes", lambda: reading.usage(namespace), None),
            autoscalers=reading.optional(
                "autoscalers", lambda: read_autoscalers(api.get, api.may), Autoscalers()
            ),
            quotas=reading.optional("quotas", lambda: read_quotas(api.get, namespace, rules.quota_pod), ()),
            unknown=tuple(dict.fromkeys(reading.unknown)),
        )


def cluster_capacity(
    state: ClusterState, catalogue: Catalogue, rules: PodRules, *, gpu: str | None = None
) -> Cluster:
    """Return the capacity for pods under these rules; ``gpu``: see :func:`read_cluster`."""
    present = group(
        state.context,
        [node for node in state.nodes if rules.refuses(node.labels) is None],
        catalogue,
        rules,
        usage=state.usage,
        user_gpu=None if gpu is None else _smallest_gpu(catalogue.gpus_called(gpu)),
    )
    scalers, unknown = state.autoscalers, state.unknown
    clouds = clouds_of(state.nodes)
    present = _with_node_groups(present, state.nodes, scalers.groups, _machines(catalogue, clouds))
    pool_nodes = [
        nodes
        for pool in scalers.pools
        for nodes in _nodes_of_pool(pool, _machines(catalogue, {pool.cloud} if pool.cloud else clouds), rules)
    ]
    if scalers.unknown and clouds and not scalers.karpenter:
        unknown = (*unknown, f"which node groups may grow ({scalers.unknown})")
    return replace(present, nodes=(*present.nodes, *pool_nodes), quotas=state.quotas, unknown=unknown)


def _smallest_gpu(gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU with the least memory, then the slowest links: a plan for it fits the others too."""
    return min(gpus, key=lambda gpu: (gpu.usable_bytes, gpu.interconnect_gbps or 0.0))


def _machines(catalogue: Catalogue, clouds: Iterable[str]) -> list[Instance]:
    """Return instance types of the clouds with complete NVIDIA GPUs and known size."""
    return [
        item
        for item in catalogue.instances
        if item.cloud in clouds
        and item.gpu_count > 0
        and catalogue.gpu(item.gpu).vendor == "nvidia"
        and tables.pod_resources_on(item) is not None
    ]


def _nodes_of_pool(pool: NodePool, machines: list[Instance], rules: PodRules) -> Iterator[ClusterNodes]:
    """Yield the instance types that a NodePool may start for the run's pods."""
    untolerated = rules.match_taints(pool.taints)[1]
    for item in machines:
        new_nodes = pool.machines_left(item)
        if new_nodes != 0 and pool.refuses({**machine_labels(item), **rules.labels}) is None:
            yield replace(
                _new_node(item),
                max_new_nodes=new_nodes,
                added_by=f"Karpenter's NodePool {pool.name}",
                spot=pool.spot,
                taints=pool.taints,
                untolerated_taints=untolerated,
            )


def _new_node(item: Instance) -> ClusterNodes:
    """Return a node that may be added, with the resources it will have for pods."""
    available = tables.pod_resources_on(item)
    return ClusterNodes(
        instance=item,
        gpu=hardware.gpu(item.gpu),
        count=0,
        cpu=available.cpu if available else 0.0,
        memory_bytes=available.memory_bytes if available else 0,
        ephemeral_bytes=None,
        efa=1 if "EFA" in item.fabric else 0,
        spot=None,
        zones=(),
        taints=(),
        names=(),
    )


def _with_node_groups(
    present: Cluster, nodes: tuple[Node, ...], groups: tuple[NodeGroup, ...], machines: list[Instance]
) -> Cluster:
    """Add the nodes that node groups may add: of their present type, otherwise (a guess) any of the cloud."""
    kinds = list(present.nodes)
    for node_group in groups:
        new_nodes = node_group.max_nodes - node_group.nodes
        if new_nodes <= 0:
            continue
        description = f"node group {node_group.name}"
        members = _members(node_group, nodes)
        index = next((n for n, kind in enumerate(kinds) if members & set(kind.names)), None)
        if index is not None:
            kinds[index] = replace(
                kinds[index],
                max_new_nodes=(kinds[index].max_new_nodes or 0) + new_nodes,
                added_by=f"the {description}",
            )
        elif not members:
            kinds += [
                replace(_new_node(item), max_new_nodes=new_nodes, added_by=f"the {description}", guessed=True)
                for item in machines
            ]
    return replace(present, nodes=tuple(kinds))


def _members(node_group: NodeGroup, nodes: tuple[Node, ...]) -> set[str]:
    """Return the nodes of a group by name: gke-CLUSTER-POOL-..., eks-POOL-..., aks-POOL-..."""
    pools = {node.name: node.labels[key] for node in nodes for key in GROUP_LABELS if key in node.labels}
    named = [pool for pool in set(pools.values()) if f"-{pool}-" in f"-{node_group.name}-"]
    longest = max(named, key=len, default=None)
    return {name for name, pool in pools.items() if pool == longest}
