"""ResourceQuotas of a namespace: limits on the sum of its pods' requests, and current usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from estimator.hardware.cluster.api import Json
from estimator.hardware.cluster.priorities import default_priority_class
from estimator.hardware.cluster.quantities import format_amount, quantity

PREFIX = "requests."
# Kubernetes, "resource quotas": a quota with scopes counts pods and their requests, no other objects
_OBJECTS = ("count/", "services")
_PRIORITY_SCOPE = "PriorityClass"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaPod:
    """Properties of a run's pod for the scopes of quotas. It requests CPU and memory: never BestEffort."""

    has_deadline: bool = True  # set by Metaflow: scope Terminating
    priority_class: str | None = None  # None: the cluster's default
    across_namespaces: bool = False  # affinities to pods of other namespaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """One entry of a ResourceQuota. Amounts in cores, bytes and counts."""

    name: str
    key: str  # in the quota: "requests.nvidia.com/gpu", "pods"
    limit: float
    used: float

    @property
    def resource(self) -> str:
        """Resource of the pods' requests that is counted: "nvidia.com/gpu", "cpu"."""
        return self.key.removeprefix(PREFIX)

    @property
    def remaining(self) -> float:
        return max(self.limit - self.used, 0.0)

    def amount(self, value: float) -> str:
        """Format an amount of the resource."""
        return format_amount(self.key, value)


def read_quotas(get: Callable[..., Json], namespace: str, pod: QuotaPod) -> tuple[Quota, ...]:
    """Return all quota entries of a namespace that count such a pod. Raises what ``get`` raises."""
    quotas = get(f"/api/v1/namespaces/{namespace}/resourcequotas").get("items") or []
    if pod.priority_class is None and any(_PRIORITY_SCOPE in _scopes(quota) for quota in quotas):
        pod = replace(pod, priority_class=default_priority_class(get))
    return tuple(line for quota in quotas if _counts(quota, pod) for line in _entries(quota))


def _entries(quota: Json) -> Iterator[Quota]:
    status, spec = quota.get("status") or {}, quota.get("spec") or {}
    usage = status.get("used") or {}
    for name, limit in (status.get("hard") or spec.get("hard") or {}).items():
        if _scopes(quota) and name.startswith(_OBJECTS) and name != "count/pods":
            continue
        yield Quota(
            name=quota["metadata"]["name"],
            key=name,
            limit=quantity(limit),
            used=quantity(usage.get(name, "0")),
        )


def _scopes(quota: Json) -> dict[str, list[Json]]:
    """Return the selectors by scope; the short form only requires that the scope applies."""
    spec = quota.get("spec") or {}
    scopes: dict[str, list[Json]] = {name: [{"operator": "Exists"}] for name in spec.get("scopes") or []}
    for item in (spec.get("scopeSelector") or {}).get("matchExpressions") or []:
        scopes.setdefault(item["scopeName"], []).append(item)
    return scopes


def _counts(quota: Json, pod: QuotaPod) -> bool:
    """Return whether the pod is within all scopes; scopes of other objects never include pods."""
    within = {
        "Terminating": pod.has_deadline,
        "NotTerminating": not pod.has_deadline,
        "NotBestEffort": True,
        "CrossNamespacePodAffinity": pod.across_namespaces,
    }
    return all(
        all(_selects(item, pod.priority_class or "") for item in demands)
        if scope == _PRIORITY_SCOPE
        else within.get(scope, False)
        for scope, demands in _scopes(quota).items()
    )


def _selects(demand: Json, priority_class: str) -> bool:
    values = demand.get("values") or []
    return {
        "Exists": bool(priority_class),
        "DoesNotExist": not priority_class,
        "In": priority_class in values,
        "NotIn": priority_class not in values,
    }.get(str(demand.get("operator")), False)
