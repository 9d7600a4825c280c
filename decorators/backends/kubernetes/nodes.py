"""Preflight checks of nodes: which could run the request, zones, GPUs, fabric."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from decorators._metaflow import deployer
from decorators.backends import tables
from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, Destination, MinimumRequest, StepRequest
from decorators.backends.kubernetes.fabric import GKE_INTERFACES, describe_unused, fabric_of, unused_devices
from decorators.backends.kubernetes.fit import Fit, archs_of, fit
from decorators.backends.kubernetes.offered import networks_of
from decorators.backends.kubernetes.request import efa_interfaces
from decorators.backends.kubernetes.scopes import quota_pod
from decorators.backends.kubernetes.security import is_restricted
from decorators.backends.options import Options
from estimator import hardware
from estimator.formatting import format_bytes
from estimator.hardware.catalogue.parts import is_part
from estimator.hardware.cluster import pods as cluster_pods
from estimator.hardware.cluster import tables as cluster_tables
from estimator.hardware.cluster.api import ApiRefusedError, ClusterApi, Json, UnreachableError, get_or_none
from estimator.hardware.cluster.machines import group
from estimator.hardware.cluster.nodes import GPUS, RULE, Node, read_nodes
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.pools import CAPACITY_TYPE, Growth, could_grow, read_autoscalers, refusal
from estimator.hardware.cluster.tables import PodResources, SpotLabel
from estimator.hardware.cluster.taints import Toleration, is_gpu_toleration, toleration_option
from estimator.plan import Request

DEVICE_PLUGIN = f"kubectl apply -f {tables.release('NVIDIA device plugin').manifest}"
OTHER_GPUS = "Show the cluster's GPUs (finetune gpus --from-cluster) and plan for them with --gpu and --gpus"
LARGER_NODE = "Add a larger node, or request less: --with kubernetes:disk=MB,memory=MB,cpu=N"
INSTALL_EFA = "Install the EFA device plugin: components/efa-device-plugin in infra/kubernetes/README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSettings(PodRules):
    """Settings of the pods that Metaflow will submit, except their size."""

    service_account: str | None = None
    image: str | None = None
    extended: tuple[tuple[str, float], ...] = ()  # extended resources set by the user
    guaranteed: bool = False  # limits equal the requests; otherwise only GPUs have limits
    restricted: bool = False  # meets the pod security standard "restricted"
    submits: bool = True  # this login submits the pods, rather than the scheduler of a deployed flow

    @classmethod
    def of(cls, destination: Destination | StepRequest, *, gpus: bool = True) -> PodSettings:
        """Return the settings from before the step was placed, even if it has been placed since.

        Equal settings make repeated checks of a cluster hit the cache.
        """
        values, selector = destination.configured, destination.user_values.get("node_selector")
        tolerate_gpu_taints = "tolerations" not in destination.user_values
        tolerations = tuple(Toleration.of(item) for item in values.get("tolerations") or ())
        if gpus and tolerate_gpu_taints:  # some tolerations of the table may have been set by this package
            tolerations = tuple(item for item in tolerations if not is_gpu_toleration(item))
        extended = (
            values.get("extended_resources") if "extended_resources" in destination.user_values else None
        )
        labels = selector.value if selector is not None and isinstance(selector.value, dict) else {}
        return cls(
            namespace=values.get("namespace") or "default",
            service_account=values.get("service_account"),
            image=values.get("image"),
            node_selector=tuple(labels.items()),
            tolerations=tolerations,
            tolerate_gpu_taints=tolerate_gpu_taints,
            zone=destination.options.zone,
            quota_pod=quota_pod(destination.options),
            extended=tuple((name, float(count)) for name, count in (extended or {}).items()),
            guaranteed=str(values.get("qos") or "").lower() == "guaranteed",
            restricted=is_restricted(values.get("security_context") or {}),
            submits=deployer() is None,
        )


@dataclass(kw_only=True, slots=True)
class Preflight:
    """State of one preflight: the request, the API client, and the findings so far."""

    api: ClusterApi
    request: Request
    options: Options
    pods: PodSettings
    minimum: MinimumRequest | None
    findings: Findings

    def find(self, path: str) -> Json | None:
        """Return the object at a path; None if the cluster has none."""
        return get_or_none(self.api.get, path)

    def namespaced(self, kind: str, name: str = "", group: str = "") -> str:
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.pods.namespace}/{kind}" + (f"/{name}" if name else "")


def check_nodes(preflight: Preflight) -> ClusterFacts:
    """Add the findings on nodes, GPUs and fabric; return facts about the nodes that fit."""
    try:
        nodes = read_nodes(preflight.api.get)
    except (ApiRefusedError, UnreachableError) as error:
        preflight.findings.unknown(
            "nodes", f"access denied: {error}", f"An administrator can allow it: {RULE}"
        )
        return ClusterFacts()
    cpu_tolerations = _cpu_tolerations(preflight, nodes)
    pods = preflight.pods
    if not preflight.request.gpus_per_node:
        pods = replace(pods, tolerations=(*pods.tolerations, *cpu_tolerations))
    judge = partial(fit, nodes, preflight.request, pods, preflight.minimum, extended=preflight.pods.extended)
    fitting = judge()
    daemons, daemon_note = _daemons(preflight, fitting)
    if daemons is not None:
        fitting = judge(daemons=daemons)
    if len(fitting.names) >= preflight.request.nodes:
        capacity = f"{len(fitting.names)} could run it, {preflight.request.nodes} needed"
        idle_note = _idle(preflight, [node for node in nodes if node.name in set(fitting.names)])
        if idle_note is not None and idle_note < preflight.request.nodes:
            preflight.findings.unknown(
                "nodes", f"{capacity}, {idle_note} with free GPUs: the run will wait for others to end"
            )
        else:
            preflight.findings.ok("nodes", f"{capacity}; {daemon_note}")
        _zones(preflight, fitting)
        growth = Growth(possible=False)
    else:
        growth = _too_few(preflight, fitting)
    several = preflight.request.nodes > 1
    networks = networks_of(preflight.api.get, preflight.pods.namespace) if several else ()
    facts = replace(fitting.facts, networks=networks)
    _fabric(preflight, fitting, facts)
    return replace(
        facts,
        archs=archs_of(node for node in nodes if node.unavailable is None),
        cpu_tolerations=cpu_tolerations,
        tolerations=tuple(dict.fromkeys((*facts.tolerations, *growth.tolerations))),
        spot=facts.spot or _spot_label_of_growth(growth, preflight.request),
    )


def _cpu_tolerations(preflight: Preflight, nodes: list[Node]) -> tuple[Toleration, ...]:
    """Return the tolerations of steps without GPUs on a cluster where every node has a GPU taint.

    Empty if a node has no GPU taint, or an autoscaler could add such a node: GPU nodes are then left to
    GPU steps.
    """
    pods = preflight.pods
    fences = [pods.match_taints(node.taints, gpus=True) for node in nodes if node.unavailable is None]
    free = [
        node
        for node in nodes
        if node.unavailable is None and not pods.match_taints(node.taints, gpus=False)[1]
    ]
    needed = tuple(
        dict.fromkeys(each for tolerations, closed in fences if not closed for each in tolerations)
    )
    if free or not needed:
        return ()
    smallest_request = Request(
        nodes=1, gpus_per_node=0, gpu_type=None, cpu=1, memory_mib=1, shared_memory_mib=0, disk_mib=0
    )
    try:
        scalers = read_autoscalers(preflight.api.get, preflight.api.may)
    except (ApiRefusedError, UnreachableError):
        return needed
    pools = any(refusal(pool, smallest_request, pods) is None for pool in scalers.pools)
    if pools or any(group.nodes == 0 < group.max_nodes for group in scalers.groups):
        return ()
    return needed


def _spot_label_of_growth(growth: Growth, request: Request) -> SpotLabel | None:
    """Return the label of spot nodes that will be added; None if unknown."""
    if not request.spot or not growth.possible:
        return None
    rows = cluster_tables.spot_labels()
    if growth.by_karpenter:
        return next(row for row in rows if row.label == CAPACITY_TYPE)
    return next((row for row in rows if row.cloud == request.cloud and row.label != CAPACITY_TYPE), None)


def _daemons(preflight: Preflight, fitting: Fit) -> tuple[PodResources | None, str]:
    """Return the requests of the nodes' daemon pods, None if unknown, and their description."""
    daemon_requests, assumed = None, " (assumed: this login may not list pods in all namespaces)"
    try:
        if preflight.api.may("list", "pods"):
            daemon_requests = cluster_pods.largest_daemon_requests(preflight.api.get, fitting.names)
            assumed = " (assumed: the nodes have none yet)"
    except (ApiRefusedError, UnreachableError) as error:
        assumed = f" (assumed: {error})"
    reserved = daemon_requests or cluster_tables.daemons()
    note = f"{reserved.cpu:g} CPUs and {format_bytes(reserved.memory_bytes)} reserved for daemon pods"
    return daemon_requests, note + ("" if daemon_requests else assumed)


def _idle(preflight: Preflight, nodes: list[Node]) -> int | None:
    """Count the nodes with enough free GPUs; None if unknown, or if no GPUs are requested.

    If this login may list pods only in the run's namespace, only those pods are counted.
    """
    gpus = preflight.request.gpus_per_node
    try:
        api, namespace = preflight.api, preflight.pods.namespace
        usage = cluster_pods.allowed_usage(api.get, api.may, namespace)[0] if gpus else None
    except (ApiRefusedError, UnreachableError):
        return None
    if usage is None:
        return None
    catalogue, request = hardware.current(), preflight.request
    gpu_type = request.gpu_type
    gpu = catalogue.gpu(gpu_type) if gpu_type and (request.gpu_assumed or is_part(gpu_type)) else None
    grouped = group("", nodes, catalogue, preflight.pods, usage=usage, user_gpu=gpu)
    return sum(group.count for group in grouped.nodes if group.free_gpus >= gpus)


def _too_few(preflight: Preflight, fitting: Fit) -> Growth:
    """Add the finding that too few nodes fit; return which nodes an autoscaler could add."""
    request = preflight.request
    rejections = (
        ", ".join(f"{count} {reason}" for reason, count in fitting.rejections[:4]) or "no further nodes"
    )
    summary = f"{len(fitting.names)} of {request.nodes} nodes could run it; other nodes: {rejections}"
    try:
        growth = could_grow(
            read_autoscalers(preflight.api.get, preflight.api.may), request, fitting.clouds, preflight.pods
        )
    except (ApiRefusedError, UnreachableError) as error:
        preflight.findings.unknown("nodes", f"{summary}; possible new nodes are unknown: {error}")
        return Growth(possible=False)
    if growth.possible:
        preflight.findings.unknown("nodes", f"{summary}; {growth.why}", growth.command)
    elif any("device plugin" in reason for reason, _ in fitting.rejections):
        preflight.findings.no("device plugin", summary, DEVICE_PLUGIN)
    else:
        fix = LARGER_NODE
        if request.gpus_per_node:
            taints = fitting.blocking_taints or growth.untolerated_taints
            fix = toleration_option(taints) if taints else OTHER_GPUS
        preflight.findings.no("nodes", f"{summary}; {growth.why}", fix)
    return growth


def _zones(preflight: Preflight, fitting: Fit) -> None:
    if preflight.request.nodes < 2 or fitting.facts.zone or preflight.options.zone or not fitting.zones:
        return
    spread = ", ".join(f"{zone}: {count}" for zone, count in fitting.zones)
    preflight.findings.unknown(
        "zone",
        f"no zone has {preflight.request.nodes} of the nodes ({spread}): "
        "traffic between zones is slow and costs money",
        "Use one zone: --zone NAME",
    )


def _fabric(preflight: Preflight, fitting: Fit, facts: ClusterFacts) -> None:
    if preflight.request.nodes < 2 or preflight.options.fabric == "none":
        return
    used = fabric_of(preflight.request, preflight.options, facts)
    if used is not None and used.name != "efa":
        devices = ", ".join(f"{count} {name}" for name, count in used.resources)
        preflight.findings.ok("fabric", f"{used.name}: {devices or dict(used.annotations)[GKE_INTERFACES]}")
        return
    if used is None and (devices_unused := unused_devices(facts)) and preflight.request.gpus_per_node:
        preflight.findings.unknown("fabric", *describe_unused(devices_unused))
        return
    if facts.efa and preflight.request.gpus_per_node and not efa_interfaces(preflight.request, facts):
        gpus = dict(facts.devices or ()).get(GPUS, 0)
        preflight.findings.unknown(
            "fabric",
            f"EFA is not used: the pods take {preflight.request.gpus_per_node} of the {gpus} GPUs of a node, "
            "so NCCL will use TCP",
            f"Use whole nodes: --gpus {gpus}",
        )
        return
    fabric = tables.fabric_of(hardware.current().find_instance(preflight.request.instance_type))
    if facts.efa:
        preflight.findings.ok("fabric", f"EFA, {facts.efa} interfaces per node")
    elif fabric is None:
        return
    elif not fabric.requestable:
        preflight.findings.unknown("fabric", f"{fabric.name} is not used: {fabric.why}")
    elif fitting.names and "aws" in fitting.clouds:
        preflight.findings.unknown(
            "fabric", "the machines have EFA, but the nodes do not offer it: NCCL will use TCP", INSTALL_EFA
        )
