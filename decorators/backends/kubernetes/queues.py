"""Preflight checks of queues, above all of Kueue's: whether the queue could ever admit the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from decorators.backends import tables
from decorators.backends.kubernetes import scheduler_queues
from decorators.backends.kubernetes.affinity import HOSTNAME_LABEL
from decorators.backends.kubernetes.nodes import Preflight
from decorators.backends.kubernetes.schedulers import APIS, NAMES
from estimator.hardware.cluster.api import ApiRefusedError, Json
from estimator.hardware.cluster.quantities import format_amount, quantity

KUEUE = "kueue.x-k8s.io"
_Lent = Callable[[str, str], float]  # (flavor, resource) -> amount
INSTALL_KUEUE = f"kubectl apply --server-side -f {tables.release('Kueue').manifest}"


def queue(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """Check that the queue exists, accepts jobs, and that its ClusterQueue could admit all pods at once."""
    name = preflight.options.queue_for(preflight.request.gpu_type)
    if not name:
        return
    system, other = manager(preflight, name)
    if system != "kueue":
        if other is None:
            listing = f"kubectl get queues.{APIS[system].partition('/')[0]}"
            preflight.findings.no("queue", f"{NAMES[system]} has no queue {name!r}", listing)
        else:
            scheduler_queues.check(preflight, system, other, pod)
        return
    group = preflight.find(f"/apis/{KUEUE}")
    if group is None:
        preflight.findings.no(
            "queue",
            f"{name!r} is a queue of Kueue, which is not installed",
            f"Omit --queue, or install Kueue: {INSTALL_KUEUE} (queues: infra/kubernetes/README.md)",
        )
        return
    version = group["preferredVersion"]["groupVersion"]
    local_queue = preflight.find(preflight.namespaced("localqueues", name, version))
    if local_queue is None:
        _other_queues(preflight, name, version)
    else:
        _state(preflight, name, local_queue)
        _quota(preflight, str(local_queue.get("spec", {}).get("clusterQueue", "")), version, pod)


def manager(preflight: Preflight, name: str) -> tuple[str, Json | None]:
    """Return (what manages a queue, the queue if it is one of Volcano or KAI).

    Unless the user has chosen, it is the first that has a queue of this name, otherwise Kueue.
    """
    chosen = preflight.options.queue_system
    if chosen == "auto":
        group = preflight.find(f"/apis/{KUEUE}")
        version = group["preferredVersion"]["groupVersion"] if group else ""
        if group and preflight.find(preflight.namespaced("localqueues", name, version)) is not None:
            return "kueue", None
        for system in APIS:
            if preflight.find(f"/apis/{APIS[system].partition('/')[0]}") is None:
                continue  # not installed, so this login may lack the right to read it
            if (queue := scheduler_queues.find(preflight, system, name)) is not None:
                return system, queue
        return "kueue", None
    return chosen, scheduler_queues.find(preflight, chosen, name) if chosen in APIS else None


def near(preflight: Preflight) -> str | None:
    """Return the label of the lowest level above single nodes of the queue's topology; None if it has none.

    Kueue gives a workload with a topology request only flavors with a topology, so all flavors of the queue
    must have the level.
    """
    name = preflight.options.queue_for(preflight.request.gpu_type)
    if not name or preflight.request.nodes < 2:
        return None
    group = preflight.find(f"/apis/{KUEUE}")
    if group is None:
        return None
    version = group["preferredVersion"]["groupVersion"]
    local_queue = preflight.find(preflight.namespaced("localqueues", name, version)) or {}
    cluster_queue = str((local_queue.get("spec") or {}).get("clusterQueue") or "")
    spec = (preflight.find(f"/apis/{version}/clusterqueues/{cluster_queue}") or {}).get("spec") or {}
    flavors = [
        str(flavor["name"])
        for part in spec.get("resourceGroups") or []
        for flavor in part.get("flavors") or []
    ]
    levels = [_levels(preflight, flavor, version) for flavor in flavors]
    shared = [
        level
        for level in (levels[0] if levels else [])
        if level != HOSTNAME_LABEL and all(level in labels for labels in levels)
    ]
    return shared[-1] if shared else None


def _levels(preflight: Preflight, flavor: str, version: str) -> list[str]:
    """Return the labels of a flavor's topology, widest level first; empty if it has none."""
    flavor_object = preflight.find(f"/apis/{version}/resourceflavors/{flavor}") or {}
    if not (name := (flavor_object.get("spec") or {}).get("topologyName")):
        return []
    topology = preflight.find(f"/apis/{version}/topologies/{name}") or {}
    return [str(level["nodeLabel"]) for level in (topology.get("spec") or {}).get("levels") or []]


def _other_queues(preflight: Preflight, name: str, version: str) -> None:
    listed = preflight.api.get(preflight.namespaced("localqueues", "", version)).get("items") or []
    queues = [item["metadata"]["name"] for item in listed]
    preflight.findings.no(
        "queue",
        f"namespace {preflight.pods.namespace} has no LocalQueue {name!r}",
        f"--queue {' or '.join(queues[:5])}"
        if queues
        else f"kubectl get localqueues -n {preflight.pods.namespace}; see infra/kubernetes/README.md",
    )


def _state(preflight: Preflight, name: str, local_queue: Json) -> None:
    conditions = local_queue.get("status", {}).get("conditions") or []
    inactive = [c for c in conditions if c.get("type") == "Active" and c.get("status") == "False"]
    if inactive or local_queue.get("spec", {}).get("stopPolicy", "None") != "None":
        reason = inactive[0].get("message", "") if inactive else "the queue is stopped"
        preflight.findings.unknown(
            "queue",
            f"{name} accepts no jobs now: {reason}",
            f"kubectl describe localqueue {name} -n {preflight.pods.namespace}",
        )
    else:
        preflight.findings.ok(
            "queue", f"{name}, of cluster queue {local_queue.get('spec', {}).get('clusterQueue', '?')}"
        )


def _quota(preflight: Preflight, name: str, version: str, pod: Mapping[str, float]) -> None:
    """Check the quota. Kueue admits all pods of a workload or none, one flavor per pod set and resource."""
    cluster_queue = preflight.find(f"/apis/{version}/clusterqueues/{name}")
    if cluster_queue is None:
        preflight.findings.unknown(
            "queue", f"ClusterQueue {name!r} does not exist: no job is admitted", "kubectl get clusterqueues"
        )
        return
    spec = cluster_queue.get("spec") or {}
    requested = {what: amount * preflight.request.nodes for what, amount in pod.items() if amount}
    groups = spec.get("resourceGroups") or []
    covered = {what for group in groups for what in group.get("coveredResources") or []}
    fix = f"kubectl edit clusterqueue {name}; infra/kubernetes/examples/eks-h100/quotas.yaml is an example"
    if missing := sorted(set(requested) - covered):
        preflight.findings.no("queue", f"ClusterQueue {name} has no quota of {', '.join(missing)}", fix)
    lent_amount = _lent(preflight, name, spec, version)
    for group in groups:
        flavors = {
            str(item.get("name")): _flavor_limits(item, lent_amount) for item in group.get("flavors") or []
        }
        in_group = {
            what: requested[what] for what in group.get("coveredResources") or [] if what in requested
        }
        short = [_short(flavor, limits, in_group) for flavor, limits in flavors.items()]
        if not (in_group and short and all(short)):
            continue
        borrowed = f", with what cohort {_cohort(spec)} lends" if _cohort(spec) else ""
        shortage = f"ClusterQueue {name}: {'; '.join(short)}{borrowed}"
        totals = {what: sum(limits.get(what, 0.0) for limits in flavors.values()) for what in in_group}
        if any(totals[what] < amount for what, amount in in_group.items()):
            preflight.findings.no("queue", f"{shortage}: it can never admit the run", fix)
        else:  # the main pod and the worker pods may get different flavors
            preflight.findings.unknown(
                "queue", f"{shortage}: the run may have to be split between flavors", fix
            )


def _cohort(spec: Json) -> str:
    """Return the name of a ClusterQueue's cohort; empty if it has none."""
    return str(spec.get("cohortName") or spec.get("cohort") or "")


def _lent(preflight: Preflight, name: str, spec: Json, version: str) -> _Lent:
    """Return the maximum amounts that the other queues of the cohort lend.

    Unlimited if this login may not list the queues, or if the cohort has its own quotas or a parent.
    """
    if not (cohort := _cohort(spec)):
        return lambda *_: 0.0
    try:
        queues = preflight.api.get(f"/apis/{version}/clusterqueues").get("items") or []
        cohort_spec = (preflight.find(f"/apis/{version}/cohorts/{cohort}") or {}).get("spec") or {}
    except ApiRefusedError:
        return lambda *_: math.inf
    if cohort_spec.get("resourceGroups") or cohort_spec.get("parentName"):
        return lambda *_: math.inf
    lent_amounts: Counter[tuple[str, str]] = Counter()
    for other in queues:
        other_spec = other.get("spec") or {}
        if _cohort(other_spec) == cohort and other["metadata"]["name"] != name:
            lent_amounts.update(_lends(other_spec))
    return lambda flavor, what: lent_amounts[flavor, what]


def _lends(spec: Json) -> dict[tuple[str, str], float]:
    """Return the amounts that a ClusterQueue lends to its cohort, by (flavor, resource)."""
    return {
        (str(flavor.get("name")), str(item["name"])): min(
            _amount(item, "nominalQuota", 0.0), _amount(item, "lendingLimit", math.inf)
        )
        for group in spec.get("resourceGroups") or []
        for flavor in group.get("flavors") or []
        for item in flavor.get("resources") or []
    }


def _flavor_limits(flavor: Json, lent: _Lent) -> dict[str, float]:
    """Return the maximum amount of each resource in a flavor, including what the queue may borrow."""
    return {
        item["name"]: _amount(item, "nominalQuota", 0.0)
        + min(lent(str(flavor.get("name")), item["name"]), _amount(item, "borrowingLimit", math.inf))
        for item in flavor.get("resources") or []
    }


def _amount(item: Json, kind: str, default: float) -> float:
    return default if item.get(kind) is None else quantity(str(item[kind]))


def _short(flavor: str, limits: Mapping[str, float], requested: Mapping[str, float]) -> str:
    """Describe the resources of a flavor whose quota is too small; empty if none is."""
    lacks = [
        f"{format_amount(resource, limits[resource])} of {format_amount(resource, amount)} {resource}"
        for resource, amount in requested.items()
        if amount > limits.get(resource, amount)
    ]
    return f"flavor {flavor} has {', '.join(lacks)}" if lacks else ""
