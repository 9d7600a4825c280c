"""The rows of a preflight that speak of a queue of Kueue's: is it there, and could it ever admit the run?"""

from __future__ import annotations

from collections.abc import Mapping

from decorators.backends import tables
from decorators.backends.kubernetes.nodes import Preflight
from decorators.backends.kubernetes.rules import in_words
from estimator.hardware.cluster_api import Json

KUEUE = "kueue.x-k8s.io"
INSTALL_KUEUE = f"kubectl apply --server-side -f {tables.release('Kueue').manifest}"


def queue(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """Is there the queue, does it take jobs, and could its ClusterQueue ever admit all the pods at once?"""
    name = preflight.options.queue_for(preflight.request.gpu)
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


def _other_queues(preflight: Preflight, name: str, version: str) -> None:
    listed = preflight.get(preflight.namespaced("localqueues", "", version)).get("items") or []
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
    lends = bool(spec.get("cohort") or spec.get("cohortName"))
    for group in groups:
        mine = {what: asked[what] for what in group.get("coveredResources") or [] if what in asked}
        short = [_short(flavor, mine, lends) for flavor in group.get("flavors") or []]
        if mine and short and all(short):
            preflight.findings.no("queue", f"ClusterQueue {name} can never admit it: {'; '.join(short)}", fix)


def _short(flavor: Json, asked: Mapping[str, float], lends: bool) -> str:
    """What of a flavor's quota is too small, in words; empty: nothing, as far as can be known.

    In a cohort a queue borrows what others leave, up to its borrowingLimit where it has one.
    """
    from kubernetes.utils import parse_quantity

    lacks = []
    for item in flavor.get("resources") or []:
        what, most = item["name"], float(parse_quantity(str(item.get("nominalQuota", 0))))
        if lends:
            limit = item.get("borrowingLimit")
            most = float("inf") if limit is None else most + float(parse_quantity(str(limit)))
        if asked.get(what, 0) > most:
            lacks.append(f"{in_words(what, most)} of {in_words(what, asked[what])} {what}")
    return f"flavor {flavor.get('name')} has {', '.join(lacks)}" if lacks else ""
