"""The ResourceQuotas of a namespace: what its pods may ask for together, and what they do now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from estimator.hardware.cluster_api import Json
from estimator.plan import GIB

PREFIX = "requests."
GPUS = "nvidia.com/gpu"
# Kubernetes, "resource quotas": cpu is another name of requests.cpu; further resources have only the long one
SHORT = ("cpu", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """One line of a ResourceQuota. Amounts in cores, bytes and pieces."""

    name: str
    what: str  # as the quota writes it: "requests.nvidia.com/gpu", "pods"
    most: float
    used: float

    @property
    def resource(self) -> str:
        """What of a pod's requests it counts: "nvidia.com/gpu", "cpu"."""
        return self.what.removeprefix(PREFIX)

    @property
    def left(self) -> float:
        return max(self.most - self.used, 0.0)

    def amount(self, value: float) -> str:
        """An amount of it in words."""
        in_bytes = self.what.endswith(("memory", "ephemeral-storage"))
        return f"{value / GIB:.0f}Gi" if in_bytes else f"{value:g}"


def read_quotas(get: Callable[..., Json], namespace: str) -> tuple[Quota, ...]:
    """All lines of all quotas of a namespace. Raises what ``get`` raises."""
    from kubernetes.utils import parse_quantity

    found: list[Quota] = []
    for quota in get(f"/api/v1/namespaces/{namespace}/resourcequotas").get("items") or []:
        status, spec = quota.get("status") or {}, quota.get("spec") or {}
        used = status.get("used") or {}
        found += [
            Quota(
                name=quota["metadata"]["name"],
                what=what,
                most=float(parse_quantity(most)),
                used=float(parse_quantity(used.get(what, "0"))),
            )
            for what, most in (status.get("hard") or spec.get("hard") or {}).items()
        ]
    return tuple(found)
