"""Preflight checks of a namespace's policies: those that would reject the pods or isolate them.

Covers quotas, limit ranges, the pod security standard, network policies and priority classes. Otherwise a
rejection shows only when the Job's controller creates the pods, minutes later and in an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decorators.backends.interface import ClusterFacts
from decorators.backends.kubernetes.nodes import Preflight
from decorators.backends.kubernetes.request import MB, efa_interfaces, gpu_resource, sizes
from decorators.backends.kubernetes.security import ENFORCE, security_context_option
from estimator.hardware.cluster.api import Json
from estimator.hardware.cluster.nodes import DISK, EFA
from estimator.hardware.cluster.priorities import read_priority_classes
from estimator.hardware.cluster.quantities import format_amount, quantities
from estimator.hardware.cluster.quotas import Quota, read_quotas

SIZES = ("cpu", "memory", DISK)
GUARANTEED = "Set limits equal to the requests: --with kubernetes:qos=Guaranteed"
OPEN_NETWORK = "kubectl apply -k infra/kubernetes/components/network-policy"
_Judge = Callable[..., None]


def amounts(preflight: Preflight, facts: ClusterFacts) -> dict[str, float]:
    """Return the request of one pod by resource, in cores, bytes and counts."""
    request = preflight.request
    size = sizes(request, facts)
    pod = {
        "cpu": float(size["cpu"]),
        "memory": float(size["memory"] * MB),
        DISK: float(size["disk"] * MB),
        gpu_resource(request, facts): float(request.gpus_per_node),
    }
    extended = dict(preflight.pods.extended) or {EFA: float(efa_interfaces(request, facts))}
    return {name: amount for name, amount in {**pod, **extended}.items() if amount}


def quota(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """Check ResourceQuotas whose scopes include the pods: requests, limits, and object counts."""
    request, namespace = preflight.request, preflight.pods.namespace
    several = request.nodes > 1
    totals = {name: amount * request.nodes for name, amount in pod.items()}
    totals |= {"pods": request.nodes, "count/pods": request.nodes, "count/jobs.batch": request.nodes}
    # Metaflow creates a JobSet for a multi-node step; JobSet creates a Job per node and a service for host
    # names
    totals |= {"count/jobsets.jobset.x-k8s.io": several, "services": several, "count/services": several}
    limits = _limits(preflight, pod)
    for line in read_quotas(preflight.api.get, namespace, preflight.pods.quota_pod):
        fix = f"kubectl describe resourcequota {line.name} -n {namespace}"
        requested = totals.get(line.resource, 0.0)
        if line.key.startswith("limits."):
            limit = limits.get(line.key.removeprefix("limits."))
            if limit is None:
                detail = f"{line.name} has {line.key}, so it rejects pods without this limit"
                preflight.findings.no("quota", detail, GUARANTEED)
                continue
            requested = limit * request.nodes
        _compare(preflight, line, requested, fix)


def _compare(preflight: Preflight, line: Quota, requested: float, fix: str) -> None:
    if requested > line.limit:
        detail = f"{line.name} allows {line.amount(line.limit)} {line.key}; {line.amount(requested)} needed"
        preflight.findings.no("quota", detail, fix)
    elif requested > line.remaining:
        preflight.findings.unknown(
            "quota", f"{line.name}: {line.key} is in use; the run waits until others end", fix
        )


def _limits(preflight: Preflight, pod: Mapping[str, float]) -> dict[str, float]:
    """Return the pods' limits of CPU, memory and disk: their own, else the defaults of a LimitRange."""
    if preflight.pods.guaranteed:
        return {name: pod[name] for name in SIZES if name in pod}
    return {
        name: amount
        for item in _limit_ranges(preflight)
        for name, amount in {**quantities(item.get("max")), **quantities(item.get("default"))}.items()
    }


def limit_range(preflight: Preflight, *, pod: Mapping[str, float]) -> None:
    """Check LimitRanges: the maximum and minimum of a container, and its default limits."""
    fix = f"kubectl describe limitrange -n {preflight.pods.namespace}; request less, or have it changed"
    for item in _limit_ranges(preflight):
        highest, lowest, default_limits = (quantities(item.get(kind)) for kind in ("max", "min", "default"))
        for name, requested in pod.items():
            amount = f"{format_amount(name, requested)} {name}"
            if requested > highest.get(name, requested):
                detail = f"allows a container {format_amount(name, highest[name])} {name}; {amount} needed"
                preflight.findings.no("limit range", f"{item['name']} {detail}", fix)
            elif requested < lowest.get(name, requested):
                detail = f"requires at least {format_amount(name, lowest[name])} {name}; {amount} requested"
                preflight.findings.no("limit range", f"{item['name']} {detail}", fix)
            elif requested > default_limits.get(name, requested) and not preflight.pods.guaranteed:
                limit = format_amount(name, default_limits[name])
                detail = f"gives containers a limit of {limit} {name}, below the {amount}"
                preflight.findings.no("limit range", f"{item['name']} {detail} needed", GUARANTEED)


def _limit_ranges(preflight: Preflight) -> list[Json]:
    """Return the limits of containers and pods (equivalent here), each with the name of its LimitRange."""
    ranges = preflight.api.get(preflight.namespaced("limitranges")).get("items") or []
    return [
        {**limits, "name": item["metadata"]["name"]}
        for item in ranges
        for limits in (item.get("spec") or {}).get("limits") or []
        if limits.get("type") in ("Container", "Pod")
    ]


def pod_security(preflight: Preflight, *, pod: Mapping[str, float]) -> None:  # noqa: ARG001
    """Check the namespace's pod security standard: "restricted" requires a security context."""
    namespace = preflight.find(f"/api/v1/namespaces/{preflight.pods.namespace}") or {}
    level = (namespace.get("metadata", {}).get("labels") or {}).get(ENFORCE)
    if level == "restricted" and not preflight.pods.restricted:
        preflight.findings.no(
            "pod security",
            f"namespace {preflight.pods.namespace} allows only restricted pods",
            security_context_option(),
        )


def network_policy(preflight: Preflight, *, pod: Mapping[str, float]) -> None:  # noqa: ARG001
    """Check that pods of a multi-node step may reach each other; otherwise they would wait forever."""
    if preflight.request.nodes < 2:
        return
    path = preflight.namespaced("networkpolicies", group="networking.k8s.io/v1")
    policies = [item.get("spec") or {} for item in preflight.api.get(path).get("items") or []]
    blocking = [
        direction
        for direction, peers in (("ingress", "from"), ("egress", "to"))
        if any(_closes(spec, direction) for spec in policies)
        and not any(_allows_pods(rule, peers) for spec in policies for rule in spec.get(direction) or [])
    ]
    if blocking:
        detail = f"the namespace allows no {' and no '.join(blocking)} among pods"
        consequence = "if the cluster enforces this, nodes cannot reach each other"
        preflight.findings.unknown("network policy", f"{detail}: {consequence}", OPEN_NETWORK)


def _closes(spec: Json, direction: str) -> bool:
    """Whether a policy blocks a direction for all pods of the namespace (its rules may allow traffic)."""
    directions = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return not spec.get("podSelector") and direction.capitalize() in directions


def _allows_pods(rule: Json, peers: str) -> bool:
    """Whether a rule allows pods of the namespace on any port."""
    selectors = rule.get(peers)
    return not rule.get("ports") and (not selectors or any("podSelector" in peer for peer in selectors))


def priority_class(preflight: Preflight, *, pod: Mapping[str, float]) -> None:  # noqa: ARG001
    """Check that the priority class exists; without it a Job's controller cannot create pods."""
    name = preflight.pods.quota_pod.priority_class
    if name is None:
        return
    names = [item.name for item in read_priority_classes(preflight.api.get)]
    if name in names:
        preflight.findings.ok("priority class", name)
        return
    preflight.findings.no(
        "priority class",
        f"{name!r} does not exist; the cluster has {', '.join(names)}",
        "Name one of these (resources.priority_class), or omit it; kubectl get priorityclasses",
    )


RULES: tuple[_Judge, ...] = (quota, limit_range, pod_security, network_policy, priority_class)
