"""The ResourceQuotas of a namespace: what its pods may ask for together, and what they do now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from estimator.hardware.cluster.api import Json
from estimator.hardware.cluster.priorities import usual_priority_class
from estimator.hardware.cluster.quantities import format_amount, quantity

PREFIX = "requests."
# Kubernetes, "resource quotas": cpu is another name of requests.cpu; further resources have only the long one
SHORT = ("cpu", "memory")
# Kubernetes, "resource quotas": a quota with scopes counts pods and what they ask for, and no other objects
_OBJECTS = ("count/", "services")
_PRIORITY_SCOPE = "PriorityClass"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaPod:
    """A run's pod as the scopes of quotas see it. It asks for CPUs and memory, so BestEffort it never is."""

    has_deadline: bool = True  # as Metaflow gives it: Terminating
    priority_class: str | None = None  # None: the cluster's default
    across_namespaces: bool = False  # affinities to pods of other namespaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """One line of a ResourceQuota. Amounts in cores, bytes and pieces."""

    name: str
    what: str  # as the quota writes it: "requests.nvidia.com/gpu", "pods"
    most: float
    used: float

    @property
    def resource(self) -> str:
        """Counted resource of a pod's requests: "nvidia.com/gpu", "cpu"."""
        return self.what.removeprefix(PREFIX)

    @property
    def left(self) -> float:
        return max(self.most - self.used, 0.0)

    def amount(self, value: float) -> str:
        """Format an amount of it."""
        return format_amount(self.what, value)


def read_quotas(get: Callable[..., Json], namespace: str, pod: QuotaPod) -> tuple[Quota, ...]:
    """All lines that count such a pod, of all quotas of a namespace. Raises what ``get`` raises."""
    quotas = get(f"/api/v1/namespaces/{namespace}/resourcequotas").get("items") or []
    if pod.priority_class is None and any(_PRIORITY_SCOPE in _scopes(quota) for quota in quotas):
        pod = replace(pod, priority_class=usual_priority_class(get))
    return tuple(line for quota in quotas if _counts(quota, pod) for line in _lines(quota))


def _lines(quota: Json) -> Iterator[Quota]:
    status, spec = quota.get("status") or {}, quota.get("spec") or {}
    used = status.get("used") or {}
    for what, most in (status.get("hard") or spec.get("hard") or {}).items():
        if _scopes(quota) and what.startswith(_OBJECTS) and what != "count/pods":
            continue
        yield Quota(
            name=quota["metadata"]["name"],
            what=what,
            most=quantity(most),
            used=quantity(used.get(what, "0")),
        )


def _scopes(quota: Json) -> dict[str, list[Json]]:
    """By the name of each scope, what is demanded of it; the short form only demands that it be there."""
    spec = quota.get("spec") or {}
    found: dict[str, list[Json]] = {name: [{"operator": "Exists"}] for name in spec.get("scopes") or []}
    for item in (spec.get("scopeSelector") or {}).get("matchExpressions") or []:
        found.setdefault(item["scopeName"], []).append(item)
    return found


def _counts(quota: Json, pod: QuotaPod) -> bool:
    """Whether the pod is within all scopes; a scope of other objects, such as volumes, has none of it."""
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
