"""The rows of a preflight that speak of a namespace's rules: what would refuse the pods, or cut them off.

Quotas, limit ranges, the pod security standard, network policies and priority classes. The server tells of a
refusal only when a Job's controller makes the pods, minutes later and in an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decorators.backends.interface import ClusterFacts
from decorators.backends.kubernetes.nodes import Preflight
from decorators.backends.kubernetes.request import MB, efa_interfaces, sizes
from decorators.backends.kubernetes.security import ENFORCE, option
from estimator.hardware.cluster.api import Json
from estimator.hardware.cluster.nodes import DISK, EFA, GPUS
from estimator.hardware.cluster.priorities import read_priority_classes
from estimator.hardware.cluster.quantities import format_amount, quantities
from estimator.hardware.cluster.quotas import Quota, read_quotas

SIZES = ("cpu", "memory", DISK)
GUARANTEED = "--with kubernetes:qos=Guaranteed gives the pods limits, equal to what they ask for"
OPEN_NETWORK = "kubectl apply -k infra/kubernetes/components/network-policy"
_Judge = Callable[..., None]


def amounts(preflight: Preflight, facts: ClusterFacts) -> dict[str, float]:
    """Return the request of one pod by resource: cores, bytes and counts."""
    request = preflight.request
    size = sizes(request, facts)
    pod = {
        "cpu": float(size["cpu"]),
        "memory": float(size["memory"] * MB),
        DISK: float(size["disk"] * MB),
        GPUS: float(request.gpus_per_node),
    }
    extended = dict(preflight.pods.extended) or {EFA: float(efa_interfaces(request, facts))}
    return {name: amount for name, amount in {**pod, **extended}.items() if amount}


def quota(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """ResourceQuotas whose scopes have the pods: of what is asked for, of limits, and of objects."""
    request, namespace = preflight.request, preflight.pods.namespace
    many = request.nodes > 1
    needed = {what: amount * request.nodes for what, amount in pod.items()}
    needed |= {"pods": request.nodes, "count/pods": request.nodes, "count/jobs.batch": request.nodes}
    # Metaflow makes a JobSet of several nodes, JobSet a Job for each and a service for their names
    needed |= {"count/jobsets.jobset.x-k8s.io": many, "services": many, "count/services": many}
    limits = _limits(preflight, pod)
    for line in read_quotas(preflight.api.get, namespace, preflight.pods.in_quotas):
        fix = f"kubectl describe resourcequota {line.name} -n {namespace}"
        asked = needed.get(line.resource, 0.0)
        if line.what.startswith("limits."):
            limit = limits.get(line.what.removeprefix("limits."))
            if limit is None:
                found = f"{line.name} has {line.what}, so it refuses pods without such a limit"
                preflight.findings.no("quota", found, GUARANTEED)
                continue
            asked = limit * request.nodes
        _compare(preflight, line, asked, fix)


def _compare(preflight: Preflight, line: Quota, asked: float, fix: str) -> None:
    if asked > line.most:
        found = f"{line.name} allows {line.amount(line.most)} {line.what}; {line.amount(asked)} are needed"
        preflight.findings.no("quota", found, fix)
    elif asked > line.left:
        preflight.findings.unknown(
            "quota", f"{line.name}: {line.what} is in use; this waits until others end", fix
        )


def _limits(preflight: Preflight, pod: Mapping[str, float]) -> dict[str, float]:
    """The pods' limits of CPU, memory and disk: their own, else what a LimitRange gives those without."""
    if preflight.pods.guaranteed:
        return {name: pod[name] for name in SIZES if name in pod}
    return {
        name: amount
        for item in _limit_ranges(preflight)
        for name, amount in {**quantities(item.get("max")), **quantities(item.get("default"))}.items()
    }


def limit_range(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """LimitRanges: the most and least of a container, and the limits that it gives those without."""
    fix = f"kubectl describe limitrange -n {preflight.pods.namespace}; ask for less, or have it changed"
    for item in _limit_ranges(preflight):
        most, least, given = (quantities(item.get(kind)) for kind in ("max", "min", "default"))
        for what, asked in pod.items():
            words = f"{format_amount(what, asked)} {what}"
            if asked > most.get(what, asked):
                found = f"allows a container {format_amount(what, most[what])} {what}; {words} are needed"
                preflight.findings.no("limit range", f"{item['name']} {found}", fix)
            elif asked < least.get(what, asked):
                found = f"wants at least {format_amount(what, least[what])} {what}; {words} are asked for"
                preflight.findings.no("limit range", f"{item['name']} {found}", fix)
            elif asked > given.get(what, asked) and not preflight.pods.guaranteed:
                limit = format_amount(what, given[what])
                found = f"gives containers a limit of {limit} {what}, below the {words}"
                preflight.findings.no("limit range", f"{item['name']} {found} that are needed", GUARANTEED)


def _limit_ranges(preflight: Preflight) -> list[Json]:
    """Return the limit ranges of containers and pods, which are equal here, each with its name."""
    listed = preflight.api.get(preflight.namespaced("limitranges")).get("items") or []
    return [
        {**limits, "name": item["metadata"]["name"]}
        for item in listed
        for limits in (item.get("spec") or {}).get("limits") or []
        if limits.get("type") in ("Container", "Pod")
    ]


def pod_security(preflight: Preflight, *, pod: Mapping[str, float]) -> None:  # noqa: ARG001
    """The pod security standard that the namespace enforces: "restricted" takes a security context."""
    namespace = preflight.find(f"/api/v1/namespaces/{preflight.pods.namespace}") or {}
    level = (namespace.get("metadata", {}).get("labels") or {}).get(ENFORCE)
    if level == "restricted" and not preflight.pods.restricted:
        preflight.findings.no(
            "pod security", f"namespace {preflight.pods.namespace} takes restricted pods only", option()
        )


def network_policy(preflight: Preflight, *, pod: Mapping[str, float]) -> None:  # noqa: ARG001
    """Pods of several nodes that may not reach each other: they would wait for each other in vain."""
    if preflight.request.nodes < 2:
        return
    path = preflight.namespaced("networkpolicies", group="networking.k8s.io/v1")
    policies = [item.get("spec") or {} for item in preflight.api.get(path).get("items") or []]
    closed = [
        way
        for way, peers in (("ingress", "from"), ("egress", "to"))
        if any(_closes(spec, way) for spec in policies)
        and not any(_lets_pods(rule, peers) for spec in policies for rule in spec.get(way) or [])
    ]
    if closed:
        found = f"the namespace allows no {' and no '.join(closed)} among pods"
        means = "where the cluster enforces that, nodes don't reach each other"
        preflight.findings.unknown("network policy", f"{found}: {means}", OPEN_NETWORK)


def _closes(spec: Json, way: str) -> bool:
    """Whether a policy closes that way for all pods of the namespace, but for what rules let through."""
    ways = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return not spec.get("podSelector") and way.capitalize() in ways


def _lets_pods(rule: Json, peers: str) -> bool:
    """Whether a rule lets pods of the namespace through, on any port."""
    named = rule.get(peers)
    return not rule.get("ports") and (not named or any("podSelector" in peer for peer in named))


def priority_class(preflight: Preflight, *, pod: Mapping[str, float]) -> None:  # noqa: ARG001
    """Is it there? Pods of one that isn't are refused when a Job's controller makes them."""
    name = preflight.pods.in_quotas.priority_class
    if name is None:
        return
    there = [item.name for item in read_priority_classes(preflight.api.get)]
    if name in there:
        preflight.findings.ok("priority class", name)
        return
    preflight.findings.no(
        "priority class",
        f"there is no {name!r}; the cluster has {', '.join(there)}",
        "Name one of those (resources.priority_class), or leave it out; kubectl get priorityclasses",
    )


RULES: tuple[_Judge, ...] = (quota, limit_range, pod_security, network_policy, priority_class)
