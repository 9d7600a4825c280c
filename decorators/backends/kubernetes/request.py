"""A plan's request -> every value of ``@kubernetes``, ``@resources`` and the environment. Pure functions.

What the cluster itself has told (``ClusterFacts``, from the preflight) goes before what the tables say.
Metaflow makes a JobSet of a step on several nodes; the same values hold for each of its pods.

Units: ``memory`` and ``disk`` in MB (10**6 bytes), ``shared_memory`` in MiB.
"""

from __future__ import annotations

import math
from typing import Any

from decorators.backends import tables
from decorators.backends.interface import ClusterFacts, StepRequest, StepValues
from decorators.backends.kubernetes import pod_shape
from decorators.backends.kubernetes.fabric import fabric_of
from decorators.backends.options import Options
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.cluster import tables as cluster_tables
from estimator.hardware.cluster.nodes import EFA, GPUS, HUGEPAGES, INSTANCE_TYPE, ZONE
from estimator.hardware.cluster.tables import SpotLabel
from estimator.hardware.cluster.taints import Toleration, parts, tolerated
from estimator.plan import MIB, Override, Request

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-preferred-topology"
GROUP_ANNOTATION = "kueue.x-k8s.io/podset-group-name"
HUGEPAGES_WITH_EFA = "5120Mi"  # EKS user guide, node-efa: what its test of NCCL over EFA asks for
PLACEMENT = ("node_selector", "compute_pool")
MB = 10**6


# GKE, AKS and Karpenter guides taint GPU nodes so; without nodes to look at, this harms nowhere.
USUAL = Toleration(key=GPUS, effect="NoSchedule")


def values_for(step_request: StepRequest) -> StepValues:
    """All values for one step. What the user has written is left out of what would replace it.

    ``step_request.configured`` is what ``@kubernetes`` has already, of Metaflow's own configuration.
    """
    request, given, configured, facts = (
        step_request.request,
        step_request.given,
        step_request.configured,
        step_request.facts,
    )
    resources = step_request.with_given_sizes(sizes(request, facts))
    own = "extended_resources" in given
    used = fabric_of(request, step_request.options, facts)
    other = used is not None and used.name != "efa"
    without_efa = own or other or step_request.options.fabric == "none"
    interfaces = 0 if without_efa else efa_interfaces(request, facts)
    extended = {EFA: str(interfaces)} if interfaces else {}
    if used is not None and other and not own:
        extended = {name: str(count) for name, count in used.resources}
    if interfaces and (facts.hugepages_bytes or 0) >= 5120 * MIB:
        extended[HUGEPAGES] = HUGEPAGES_WITH_EFA
    compute: dict[str, Any] = {name: resources[name] for name in ("cpu", "memory", "disk")}
    if not any(name in given for name in PLACEMENT):
        labels = selector(request, step_request.options, facts)
        compute["node_selector"] = {**(configured.get("node_selector") or {}), **labels}
    if request.gpus_per_node and "tolerations" not in given:
        compute["tolerations"] = _tolerations(configured.get("tolerations") or [], request, facts)
    if extended:
        compute["extended_resources"] = {**(configured.get("extended_resources") or {}), **extended}
    if labels := queue_labels(request, step_request.options):
        theirs = given["labels"].value if "labels" in given else {}
        theirs = theirs if isinstance(theirs, dict) else {}
        compute["labels"] = {**(configured.get("labels") or {}), **labels, **theirs}
    return StepValues(
        resources=resources,
        compute={name: value for name, value in compute.items() if value},
        environment=environment(request, "kubernetes", interfaces),
        pod_patches=pod_patches(step_request),
        lowered=lowered(step_request),
    )


def pod_patches(step_request: StepRequest) -> tuple[dict[str, Any], ...]:
    """Return the patches of training pods: fabric, topology, grace period, and the user's own last."""
    if not step_request.on_fabric:
        return ()
    options = step_request.options
    used = fabric_of(step_request.request, options, step_request.facts)
    grace = pod_shape.graceful(options.termination_grace_s) if options.termination_grace_s else None
    own = dict(options.pod_template) if options.pod_template else None
    near = _kept_near(step_request.facts.near) if step_request.facts.near else None
    return tuple(filter(None, (used.patch if used else None, near, grace, own)))


def _kept_near(level: str) -> dict[str, Any]:
    """Kueue's annotations of topology-aware scheduling; the main node's pod and the workers' are a group."""
    return {"metadata": {"annotations": {TOPOLOGY_ANNOTATION: level, GROUP_ANNOTATION: "nodes"}}}


def sizes(request: Request, facts: ClusterFacts) -> dict[str, Any]:
    """``@resources``: what the plan asks for, but no more than the node leaves for pods."""
    instance = hardware.current().find_instance(request.instance_type)
    cpu, memory = request.cpu, math.ceil(request.memory_mib * MIB / MB)
    room = facts.room or (cluster_tables.room_on(instance) if instance is not None else None)
    if room is not None:  # a byte more, and no node takes it
        cpu, memory = min(cpu, math.floor(room.cpu)), min(memory, room.memory_bytes // MB)
    return {
        "cpu": max(cpu, 1),
        "memory": memory,
        "disk": math.ceil(request.disk_mib * MIB / MB),
        "shared_memory": request.shared_memory_mib or None,
        "gpu": request.gpus_per_node or None,  # a limit of 0 would keep the pod off nodes with GPUs
    }


def lowered(step_request: StepRequest) -> tuple[Override, ...]:
    """Return by how much the room on a node lowers the plan's CPUs and memory, except for the user's
    values.
    """
    request, facts = step_request.request, step_request.facts
    left = sizes(request, facts)
    where = "a node of this cluster" if facts.room is not None else "such a machine"
    used = {
        "cpu": ("cpu", int(left["cpu"])),
        "memory": ("memory_mib", round(left["memory"] * MB / MIB)),
    }
    return tuple(
        Override(
            name=name,
            planned=str(getattr(request, name)),
            used=str(value),
            given_by=f"what {where} leaves for pods",
        )
        for attribute, (name, value) in used.items()
        if value < getattr(request, name) and attribute not in step_request.given
    )


def selector(request: Request, options: Options, facts: ClusterFacts) -> dict[str, str]:
    """Labels that the nodes must carry: the machine or its GPU, one zone, and what the request names."""
    labels: dict[str, str] = {}
    if facts.labels is not None:
        # What was looked for are nodes to train on; a step without GPUs may run on any, and mostly must.
        labels |= dict(facts.labels) if request.gpus_per_node else {}
    elif request.instance_type and " " not in request.instance_type:  # "8x H100": no type of a cloud's
        labels[INSTANCE_TYPE] = request.instance_type
    if request.nodes > 1 and (zone := options.zone or facts.zone):
        labels[ZONE] = zone
    elif options.zone:
        labels[ZONE] = options.zone
    if request.spot:
        mark = spot_mark(request, facts)
        labels[mark.label] = mark.value
    return {**labels, **dict(request.node_labels)}


def spot_mark(request: Request, facts: ClusterFacts) -> SpotLabel:
    """Return the label of the spot nodes that a request uses; UserError if it is unknown."""
    known = facts.spot or next(
        (row for row in cluster_tables.spot_labels() if row.cloud == request.cloud), None
    )
    if known is None:
        raise UserError(
            f"Nothing tells by which label {request.instance_type or 'this cluster'} is a spot node.",
            "Name it: --with kubernetes:node_selector=LABEL=VALUE, or leave --spot out.",
        )
    return known


def efa_interfaces(request: Request, facts: ClusterFacts) -> int:
    """EFA interfaces to ask for on each node: all of a whole machine's, for a step on several nodes."""
    instance = hardware.current().find_instance(request.instance_type)
    if request.nodes < 2 or instance is None or request.gpus_per_node != instance.gpu_count:
        return 0
    count = tables.efa_interfaces(instance)
    return count if facts.efa is None else min(count, facts.efa)


def environment(request: Request, backend: str, interfaces: int) -> dict[str, str]:
    """Variables for NCCL, libfabric and gloo: for the fabric that is asked for, and for no other."""
    if request.nodes < 2:
        return {}
    return tables.environment(backend, "EFA" if interfaces else None)


def queue_labels(request: Request, options: Options) -> dict[str, str]:
    """Kueue's labels. It takes a job by its queue; the priority class counts there only."""
    queue = options.queue_for(request.gpu_type)
    if not queue:
        return {}
    return {QUEUE_LABEL: queue, **({PRIORITY_LABEL: options.priority} if options.priority else {})}


def _tolerations(
    configured: list[dict[str, str]], request: Request, facts: ClusterFacts
) -> list[dict[str, str]]:
    needed = facts.tolerations or (USUAL,)
    taint = spot_mark(request, facts).taint if request.spot else ""
    if taint and not any(each.covers(*parts(taint)) for each in needed):
        needed = (*needed, *filter(None, [tolerated(taint)]))
    added = [toleration.to_dict() for toleration in needed]
    return [*configured, *(item for item in added if item not in configured)]
