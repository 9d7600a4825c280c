"""Convert a plan's request to the values of ``@kubernetes``, ``@resources`` and the environment. Pure
functions.

Facts reported by the cluster (``ClusterFacts``, from the preflight) take precedence over the tables. Metaflow
creates a JobSet for a multi-node step; the same values apply to each of its pods.

Units: ``memory`` and ``disk`` in MB (10**6 bytes), ``shared_memory`` in MiB.
"""

from __future__ import annotations

import math
from typing import Any

from decorators.backends import tables
from decorators.backends.interface import ClusterFacts, StepRequest, StepValues
from decorators.backends.kubernetes import pod_shape, schedulers
from decorators.backends.kubernetes.fabric import fabric_of
from decorators.backends.options import Options
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.catalogue.parts import profile_of
from estimator.hardware.cluster import tables as cluster_tables
from estimator.hardware.cluster.nodes import ARCH, EFA, GPUS, HUGEPAGES, INSTANCE_TYPE, MIG, SHARED_GPUS, ZONE
from estimator.hardware.cluster.tables import SpotLabel
from estimator.hardware.cluster.taints import Toleration, parts, tolerated
from estimator.plan import MIB, Override, Request

TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-preferred-topology"
GROUP_ANNOTATION = "kueue.x-k8s.io/podset-group-name"
HUGEPAGES_WITH_EFA = "5120Mi"  # request of the NCCL test in the EKS user guide, node-efa
NO_FACTS = ClusterFacts()
PLACEMENT = ("node_selector", "compute_pool")
MB = 10**6


# Taint of GPU nodes in the GKE, AKS and Karpenter guides; harmless on clusters without it
GPU_TOLERATION = Toleration(key=GPUS, effect="NoSchedule")


def values_for(step_request: StepRequest) -> StepValues:
    """Return all values for one step, without those that the user has set.

    ``step_request.configured`` holds the current values of ``@kubernetes``, from Metaflow's configuration.
    """
    request, user_values, configured, facts = (
        step_request.request,
        step_request.user_values,
        step_request.configured,
        step_request.facts,
    )
    resources = step_request.with_given_sizes(sizes(request, facts))
    user_sets_extended = "extended_resources" in user_values
    used = fabric_of(request, step_request.options, facts)
    other_fabric = used is not None and used.name != "efa"
    without_efa = user_sets_extended or other_fabric or step_request.options.fabric == "none"
    interfaces = 0 if without_efa else efa_interfaces(request, facts)
    extended = {EFA: str(interfaces)} if interfaces else {}
    if used is not None and other_fabric and not user_sets_extended:
        extended = {name: str(count) for name, count in used.resources}
    if not user_sets_extended and (resource := gpu_resource(request, facts)) != GPUS:
        extended[resource] = str(request.gpus_per_node)
    if interfaces and (facts.hugepages_bytes or 0) >= 5120 * MIB:
        extended[HUGEPAGES] = HUGEPAGES_WITH_EFA
    compute: dict[str, Any] = {name: resources[name] for name in ("cpu", "memory", "disk")}
    if not any(name in user_values for name in PLACEMENT):
        labels = selector(request, step_request.options, facts)
        compute["node_selector"] = {**(configured.get("node_selector") or {}), **labels}
    if "tolerations" not in user_values:
        compute["tolerations"] = _tolerations(configured.get("tolerations") or [], request, facts)
    if extended:
        compute["extended_resources"] = {**(configured.get("extended_resources") or {}), **extended}
    if labels := queue_labels(request, step_request.options, facts):
        user_labels = user_values["labels"].value if "labels" in user_values else {}
        user_labels = user_labels if isinstance(user_labels, dict) else {}
        compute["labels"] = {**(configured.get("labels") or {}), **labels, **user_labels}
    return StepValues(
        resources=resources,
        compute={name: value for name, value in compute.items() if value},
        environment=environment(request, "kubernetes", interfaces),
        pod_patches=pod_patches(step_request),
        lowered=lowered(step_request),
    )


def pod_patches(step_request: StepRequest) -> tuple[dict[str, Any], ...]:
    """Return the patches of pods: scheduler; for training also fabric, topology, grace; the user's last."""
    options, system = step_request.options, _queue_system(step_request.options, step_request.facts)
    queue = options.queue_for(step_request.request.gpu_type)
    scheduler = schedulers.patch(system, queue) if queue else None
    if not step_request.on_fabric:
        return (scheduler,) if scheduler else ()
    used = fabric_of(step_request.request, options, step_request.facts)
    grace_period = pod_shape.graceful(options.termination_grace_s) if options.termination_grace_s else None
    user_patch = dict(options.pod_template) if options.pod_template else None
    topology = _topology_annotations(step_request.facts.near) if step_request.facts.near else None
    return tuple(filter(None, (scheduler, used.patch if used else None, topology, grace_period, user_patch)))


def _topology_annotations(level: str) -> dict[str, Any]:
    """Return Kueue's annotations that place the main pod and the workers as one group, close together."""
    return {"metadata": {"annotations": {TOPOLOGY_ANNOTATION: level, GROUP_ANNOTATION: "nodes"}}}


def sizes(request: Request, facts: ClusterFacts) -> dict[str, Any]:
    """Return the values of ``@resources``: the plan's request, limited to what a node can give to pods."""
    instance = hardware.current().find_instance(request.instance_type)
    cpu, memory = request.cpu, math.ceil(request.memory_mib * MIB / MB)
    pod_capacity = facts.pod_capacity or (
        cluster_tables.pod_resources_on(instance) if instance is not None else None
    )
    if pod_capacity is not None:  # a larger request would fit no node
        cpu, memory = min(cpu, math.floor(pod_capacity.cpu)), min(memory, pod_capacity.memory_bytes // MB)
    whole_gpus = request.gpus_per_node if gpu_resource(request, facts) == GPUS else 0
    return {
        "cpu": max(cpu, 1),
        "memory": memory,
        "disk": math.ceil(request.disk_mib * MIB / MB),
        "shared_memory": request.shared_memory_mib or None,
        "gpu": whole_gpus or None,  # a limit of 0 would keep the pod off nodes with GPUs
    }


def gpu_resource(request: Request, facts: ClusterFacts) -> str:
    """Return the resource that counts the request's GPUs: whole ones, MIG slices, or renamed replicas."""
    offered = dict(facts.devices or ())
    profile = profile_of(request.gpu_type)
    if profile is not None and (facts.devices is None or f"{MIG}{profile}" in offered):
        return f"{MIG}{profile}"
    return SHARED_GPUS if SHARED_GPUS in offered and GPUS not in offered else GPUS


def lowered(step_request: StepRequest) -> tuple[Override, ...]:
    """Return the planned CPUs and memory that are lowered to what a node can hold, except user values."""
    request, facts = step_request.request, step_request.facts
    limited_sizes = sizes(request, facts)
    node = "a node of this cluster" if facts.pod_capacity is not None else "this machine type"
    values = {
        "cpu": ("cpu", int(limited_sizes["cpu"])),
        "memory": ("memory_mib", round(limited_sizes["memory"] * MB / MIB)),
    }
    return tuple(
        Override(
            name=name, planned=str(getattr(request, name)), used=str(value), given_by=f"allocatable on {node}"
        )
        for attribute, (name, value) in values.items()
        if value < getattr(request, name) and attribute not in step_request.user_values
    )


def selector(request: Request, options: Options, facts: ClusterFacts) -> dict[str, str]:
    """Return the node selector: the machine type or its GPU, a zone, and the labels of the request."""
    labels: dict[str, str] = {}
    if facts.labels is not None:
        # The facts are about training nodes; a step without GPUs may run on any node.
        labels |= dict(facts.labels) if request.gpus_per_node else {}
    # "8x H100" is not a machine type of a cloud
    elif request.instance_type and " " not in request.instance_type:
        labels[INSTANCE_TYPE] = request.instance_type
    if facts.arch and not request.gpus_per_node:
        labels[ARCH] = facts.arch
    if request.nodes > 1 and (zone := options.zone or facts.zone):
        labels[ZONE] = zone
    elif options.zone:
        labels[ZONE] = options.zone
    if request.spot:
        mark = spot_label_of(request, facts)
        labels[mark.label] = mark.value
    return {**labels, **dict(request.node_labels)}


def spot_label_of(request: Request, facts: ClusterFacts) -> SpotLabel:
    """Return the label of spot nodes for a request. Raises UserError if it is unknown."""
    label = facts.spot or next(
        (row for row in cluster_tables.spot_labels() if row.cloud == request.cloud), None
    )
    if label is None:
        raise UserError(
            f"The label of spot nodes of {request.instance_type or 'this cluster'} is unknown.",
            "Name it: --with kubernetes:node_selector=LABEL=VALUE, or omit --spot.",
        )
    return label


def efa_interfaces(request: Request, facts: ClusterFacts) -> int:
    """Return the EFA interfaces to request per node: all of a whole machine, for a multi-node step."""
    instance = hardware.current().find_instance(request.instance_type)
    gpus = instance.gpu_count if instance is not None else dict(facts.devices or ()).get(GPUS)
    if request.nodes < 2 or not gpus or request.gpus_per_node != gpus:
        return 0
    count = tables.efa_interfaces(instance)
    return count if facts.efa is None else min(count or facts.efa, facts.efa)


def environment(request: Request, backend: str, interfaces: int) -> dict[str, str]:
    """Return the variables of NCCL, libfabric and gloo for the requested fabric."""
    if request.nodes < 2:
        return {}
    return tables.environment(backend, "EFA" if interfaces else None)


def queue_labels(request: Request, options: Options, facts: ClusterFacts = NO_FACTS) -> dict[str, str]:
    """Return the queue's labels, with Kueue's priority class, which has no effect without a queue."""
    queue = options.queue_for(request.gpu_type)
    return schedulers.labels(_queue_system(options, facts), queue, options.priority) if queue else {}


def _queue_system(options: Options, facts: ClusterFacts) -> str:
    """Return what manages the queue: the user's choice, what the preflight found, otherwise Kueue."""
    return facts.queue_system or "kueue" if options.queue_system == "auto" else options.queue_system


def _tolerations(
    configured: list[dict[str, str]], request: Request, facts: ClusterFacts
) -> list[dict[str, str]]:
    gpus = request.gpus_per_node
    required = (facts.tolerations or (GPU_TOLERATION,)) if gpus else facts.cpu_tolerations
    taint = spot_label_of(request, facts).taint if request.spot else ""
    if taint and not any(each.covers(*parts(taint)) for each in required):
        required = (*required, *filter(None, [tolerated(taint)]))
    added = [toleration.to_dict() for toleration in required]
    return [*configured, *(item for item in added if item not in configured)]
