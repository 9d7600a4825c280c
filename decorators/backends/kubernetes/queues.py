"""The rows of a preflight that speak of a queue of Kueue's: is it there, and could it ever admit the run?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from decorators.backends import tables
from decorators.backends.kubernetes.affinity import HOSTNAME_LABEL
from decorators.backends.kubernetes.nodes import Preflight
from estimator.hardware.cluster.api import ApiRefusedError, Json
from estimator.hardware.cluster.quantities import format_amount, quantity

KUEUE = "kueue.x-k8s.io"
_Lent = Callable[[str, str], float]  # of a flavor and a resource
INSTALL_KUEUE = f"kubectl apply --server-side -f {tables.release('Kueue').manifest}"


def queue(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """Is there the queue, does it take jobs, and could its ClusterQueue ever admit all the pods at once?"""
    name = preflight.options.queue_for(preflight.request.gpu_type)
    if not name:
        return
    group = preflight.find(f"/apis/{KUEUE}")
    if group is None:
        preflight.findings.no(
            "queue",
            f"{name!r} is a queue of Kueue, which is not installed",
            f"Leave out --queue, or install Kueue: {INSTALL_KUEUE} (queues: infra/kubernetes/README.md)",
        )
        return
    version = group["preferredVersion"]["groupVersion"]
    local_queue = preflight.find(preflight.namespaced("localqueues", name, version))
    if local_queue is None:
        _other_queues(preflight, name, version)
    else:
        _state(preflight, name, local_queue)
        _quota(preflight, str(local_queue.get("spec", {}).get("clusterQueue", "")), version, pod)


def near(preflight: Preflight) -> str | None:
    """The label of the deepest level, above single nodes, of the queue's topology; None: it has none.

    Kueue gives a workload that asks for a topology no flavor without one, so all of the queue's must have it.
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
        if level != HOSTNAME_LABEL and all(level in each for each in levels)
    ]
    return shared[-1] if shared else None


def _levels(preflight: Preflight, flavor: str, version: str) -> list[str]:
    """The labels of a flavor's topology, the widest first; empty: it has none."""
    found = preflight.find(f"/apis/{version}/resourceflavors/{flavor}") or {}
    if not (name := (found.get("spec") or {}).get("topologyName")):
        return []
    topology = preflight.find(f"/apis/{version}/topologies/{name}") or {}
    return [str(level["nodeLabel"]) for level in (topology.get("spec") or {}).get("levels") or []]


def _other_queues(preflight: Preflight, name: str, version: str) -> None:
    listed = preflight.api.get(preflight.namespaced("localqueues", "", version)).get("items") or []
    others = [item["metadata"]["name"] for item in listed]
    preflight.findings.no(
        "queue",
        f"namespace {preflight.pods.namespace} has no LocalQueue {name!r}",
        f"--queue {' or '.join(others[:5])}"
        if others
        else f"kubectl get localqueues -n {preflight.pods.namespace}; infra/kubernetes/README.md makes some",
    )


def _state(preflight: Preflight, name: str, local_queue: Json) -> None:
    conditions = local_queue.get("status", {}).get("conditions") or []
    inactive = [c for c in conditions if c.get("type") == "Active" and c.get("status") == "False"]
    if inactive or local_queue.get("spec", {}).get("stopPolicy", "None") != "None":
        reason = inactive[0].get("message", "") if inactive else "it is stopped"
        preflight.findings.unknown(
            "queue",
            f"{name} takes no jobs now: {reason}",
            f"kubectl describe localqueue {name} -n {preflight.pods.namespace}",
        )
    else:
        preflight.findings.ok(
            "queue", f"{name}, of cluster queue {local_queue.get('spec', {}).get('clusterQueue', '?')}"
        )


def _quota(preflight: Preflight, name: str, version: str, pod: Mapping[str, float]) -> None:
    """Kueue admits a workload whole: each resource of all its pods must fit into one flavor's quota."""
    cluster_queue = preflight.find(f"/apis/{version}/clusterqueues/{name}")
    if cluster_queue is None:
        preflight.findings.unknown(
            "queue", f"there is no ClusterQueue {name!r}: nothing is admitted", "kubectl get clusterqueues"
        )
        return
    spec = cluster_queue.get("spec") or {}
    asked = {what: amount * preflight.request.nodes for what, amount in pod.items() if amount}
    groups = spec.get("resourceGroups") or []
    covered = {what for group in groups for what in group.get("coveredResources") or []}
    fix = f"kubectl edit clusterqueue {name}; infra/kubernetes/examples/eks-h100/quotas.yaml is an example"
    if missing := sorted(set(asked) - covered):
        preflight.findings.no("queue", f"ClusterQueue {name} has no quota of {', '.join(missing)}", fix)
    lent = _lent(preflight, name, spec, version)
    for group in groups:
        flavors = {str(item.get("name")): _most(item, lent) for item in group.get("flavors") or []}
        mine = {what: asked[what] for what in group.get("coveredResources") or [] if what in asked}
        short = [_short(flavor, most, mine) for flavor, most in flavors.items()]
        if not (mine and short and all(short)):
            continue
        borrowed = f", with what cohort {_cohort(spec)} lends" if _cohort(spec) else ""
        words = f"ClusterQueue {name}: {'; '.join(short)}{borrowed}"
        together = {what: sum(most.get(what, 0.0) for most in flavors.values()) for what in mine}
        if any(together[what] < amount for what, amount in mine.items()):
            preflight.findings.no("queue", f"{words}: it never admits this", fix)
        else:  # the main node's pod and the workers' may be of different flavors
            preflight.findings.unknown("queue", f"{words}: it may have to divide this among flavors", fix)


def _cohort(spec: Json) -> str:
    """The name of a ClusterQueue's cohort; empty: it has none."""
    return str(spec.get("cohortName") or spec.get("cohort") or "")


def _lent(preflight: Preflight, name: str, spec: Json, version: str) -> _Lent:
    """Return the maximum that the other queues of the cohort lend.

    Without a limit where this login may not list them, and in a cohort with quotas or a parent of its own.
    """
    if not (cohort := _cohort(spec)):
        return lambda *_: 0.0
    try:
        listed = preflight.api.get(f"/apis/{version}/clusterqueues").get("items") or []
        own = (preflight.find(f"/apis/{version}/cohorts/{cohort}") or {}).get("spec") or {}
    except ApiRefusedError:
        return lambda *_: math.inf
    if own.get("resourceGroups") or own.get("parentName"):
        return lambda *_: math.inf
    found: Counter[tuple[str, str]] = Counter()
    for other in listed:
        theirs = other.get("spec") or {}
        if _cohort(theirs) == cohort and other["metadata"]["name"] != name:
            found.update(_lends(theirs))
    return lambda flavor, what: found[flavor, what]


def _lends(spec: Json) -> dict[tuple[str, str], float]:
    """Return what a ClusterQueue lends to its cohort, by flavor and resource."""
    return {
        (str(flavor.get("name")), str(item["name"])): min(
            _amount(item, "nominalQuota", 0.0), _amount(item, "lendingLimit", math.inf)
        )
        for group in spec.get("resourceGroups") or []
        for flavor in group.get("flavors") or []
        for item in flavor.get("resources") or []
    }


def _most(flavor: Json, lent: _Lent) -> dict[str, float]:
    """By resource, what may be had of a flavor at the most, with what may be borrowed of it."""
    return {
        item["name"]: _amount(item, "nominalQuota", 0.0)
        + min(lent(str(flavor.get("name")), item["name"]), _amount(item, "borrowingLimit", math.inf))
        for item in flavor.get("resources") or []
    }


def _amount(item: Json, kind: str, absent: float) -> float:
    return absent if item.get(kind) is None else quantity(str(item[kind]))


def _short(flavor: str, most: Mapping[str, float], asked: Mapping[str, float]) -> str:
    """Name the resources of a flavor's quota that are too small; empty if there are none."""
    lacks = [
        f"{format_amount(what, most[what])} of {format_amount(what, amount)} {what}"
        for what, amount in asked.items()
        if amount > most.get(what, amount)
    ]
    return f"flavor {flavor} has {', '.join(lacks)}" if lacks else ""
