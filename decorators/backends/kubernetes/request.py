"""A plan's request -> every value of ``@kubernetes``, ``@resources`` and the environment. Pure functions.

What the cluster itself has told (:class:`ClusterFacts`, from the preflight) goes before what the tables say.
Metaflow makes a JobSet of a step on several nodes; the same values hold for each of its pods.

Units: ``memory`` and ``disk`` in MB (10**6 bytes), ``shared_memory`` in MiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decorators._metaflow import Given
from decorators.backends import tables
from decorators.backends.options import Options
from estimator import hardware
from estimator.hardware import Instance
from estimator.plan import MIB, Override, Request

INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
EFA = "vpc.amazonaws.com/efa"
HUGEPAGES = "hugepages-2Mi"
HUGEPAGES_WITH_EFA = "5120Mi"  # EKS user guide, node-efa: what its test of NCCL over EFA asks for
PLACEMENT = ("node_selector", "compute_pool")
MB = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint that the pod may stand on."""

    key: str  # empty: any
    effect: str  # "NoSchedule" or "NoExecute"; empty: any
    value: str | None = None  # None: any

    @classmethod
    def of(cls, item: Mapping[str, str]) -> Toleration:
        """From a pod's specification."""
        value = None if item.get("operator") == "Exists" else item.get("value") or ""
        return cls(key=item.get("key") or "", effect=item.get("effect") or "", value=value)

    def covers(self, key: str, value: str, effect: str) -> bool:
        """Whether it is about that taint."""
        return self.key in ("", key) and self.effect in ("", effect) and self.value in (None, value)

    def to_dict(self) -> dict[str, str]:
        made = {
            "key": self.key,
            "operator": "Exists" if self.value is None else "Equal",
            "effect": self.effect,
        }
        return made if self.value is None else {**made, "value": self.value}


# GKE, AKS and Karpenter guides taint GPU nodes so; without nodes to look at, this harms nowhere.
USUAL = Toleration(key="nvidia.com/gpu", effect="NoSchedule")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """What the cluster's nodes have told of the machine that the plan asks for."""

    labels: tuple[tuple[str, str], ...] | None = None  # by which it is found there; None: not known
    tolerations: tuple[Toleration, ...] = ()
    room: tables.Room | None = None  # for one pod, on the smallest of the nodes that fit
    efa: int | None = None
    hugepages_bytes: int | None = None
    zone: str | None = None  # one that has all the nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """What goes into a step's decorators."""

    resources: dict[str, Any]
    kubernetes: dict[str, Any]
    environment: dict[str, str]


def values(
    request: Request,
    *,
    given: Mapping[str, Given] | None = None,
    configured: Mapping[str, Any] | None = None,
    options: Options | None = None,
    facts: ClusterFacts | None = None,
) -> Values:
    """All values for one step. What the user has written (``given``) is left out of what would replace it.

    ``configured`` is what ``@kubernetes`` has already, of Metaflow's own configuration.
    """
    own, had = given or {}, configured or {}
    chosen, seen = options or Options(), facts or ClusterFacts()
    instance = machine_of(request)
    resources = sizes(request, seen, instance)
    asked = efa(request, seen) if "extended_resources" not in own else 0
    extended = {EFA: str(asked)} if asked else {}
    if asked and (seen.hugepages_bytes or 0) >= 5120 * MIB:
        extended[HUGEPAGES] = HUGEPAGES_WITH_EFA
    kubernetes: dict[str, Any] = {name: resources[name] for name in ("cpu", "memory", "disk")}
    if not any(name in own for name in PLACEMENT):
        kubernetes["node_selector"] = {**(had.get("node_selector") or {}), **selector(request, chosen, seen)}
    if request.gpus_per_node and "tolerations" not in own:
        kubernetes["tolerations"] = _tolerations(had.get("tolerations") or [], seen)
    if extended:
        kubernetes["extended_resources"] = {**(had.get("extended_resources") or {}), **extended}
    if labels := queue_labels(request, chosen):
        mine = own["labels"].value if "labels" in own and isinstance(own["labels"].value, dict) else {}
        kubernetes["labels"] = {**(had.get("labels") or {}), **labels, **mine}
    return Values(
        resources=resources,
        kubernetes={name: value for name, value in kubernetes.items() if value},
        environment=environment(request, "kubernetes", asked),
    )


def machine_of(request: Request) -> Instance | None:
    """The table's row of the planned machine; None where the plan names none, or one of the user's own."""
    return hardware.current().find_instance(request.instance_type) if request.instance_type else None


def sizes(request: Request, facts: ClusterFacts, instance: Instance | None) -> dict[str, Any]:
    """``@resources``: what the plan asks for, but no more than the node leaves for pods."""
    cpu, memory = request.cpu, math.ceil(request.memory_mib * MIB / MB)
    room = facts.room or (tables.room_on(instance) if instance is not None else None)
    if room is not None:  # a byte more, and no node takes it
        cpu, memory = min(cpu, math.floor(room.cpu)), min(memory, room.memory_bytes // MB)
    return {
        "cpu": max(cpu, 1),
        "memory": memory,
        "disk": math.ceil(request.disk_mib * MIB / MB),
        "shared_memory": request.shared_memory_mib or None,
        "gpu": request.gpus_per_node or None,  # a limit of 0 would keep the pod off nodes with GPUs
    }


def lowered(request: Request, facts: ClusterFacts) -> tuple[Override, ...]:
    """What the room on a node takes off the plan's CPUs and memory."""
    asked = sizes(request, facts, machine_of(request))
    where = "a node of this cluster" if facts.room is not None else "such a machine"
    used = {"cpu": int(asked["cpu"]), "memory_mib": round(asked["memory"] * MB / MIB)}
    return tuple(
        Override(
            name=name,
            planned=str(getattr(request, name)),
            used=str(value),
            given_by=f"what {where} leaves for pods",
        )
        for name, value in used.items()
        if value < getattr(request, name)
    )


def selector(request: Request, options: Options, facts: ClusterFacts) -> dict[str, str]:
    """Labels that the nodes must carry: the machine or its GPU, one zone, and what the request names."""
    found: dict[str, str] = {}
    if facts.labels is not None:
        # What was looked for are nodes to train on; a step without GPUs may run on any, and mostly must.
        found |= dict(facts.labels) if request.gpus_per_node else {}
    elif request.instance_type and " " not in request.instance_type:  # "8x H100": no type of a cloud's
        found[INSTANCE_TYPE_LABEL] = request.instance_type
    if request.nodes > 1 and (zone := options.zone or facts.zone):
        found[ZONE_LABEL] = zone
    elif options.zone:
        found[ZONE_LABEL] = options.zone
    return {**found, **dict(request.node_labels)}


def efa(request: Request, facts: ClusterFacts) -> int:
    """EFA interfaces to ask for on each node: all of a whole machine's, for a step on several nodes."""
    instance = machine_of(request)
    if request.nodes < 2 or instance is None or request.gpus_per_node != instance.gpu_count:
        return 0
    count = tables.efa_interfaces(instance)
    return count if facts.efa is None else min(count, facts.efa)


def environment(request: Request, backend: str, efa_interfaces: int) -> dict[str, str]:
    """Variables for NCCL, libfabric and gloo: for the fabric that is asked for, and for no other."""
    if request.nodes < 2:
        return {}
    return tables.environment(backend, "EFA" if efa_interfaces else None)


def queue_labels(request: Request, options: Options) -> dict[str, str]:
    """Kueue's labels. It takes a job by its queue; the priority class counts there only."""
    queue = options.queue_for(request.gpu)
    if not queue:
        return {}
    return {QUEUE_LABEL: queue, **({PRIORITY_LABEL: options.priority} if options.priority else {})}


def _tolerations(had: list[dict[str, str]], facts: ClusterFacts) -> list[dict[str, str]]:
    added = [toleration.to_dict() for toleration in facts.tolerations or (USUAL,)]
    return [*had, *(item for item in added if item not in had)]
