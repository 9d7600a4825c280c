"""PriorityClasses of a cluster, and the default one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from estimator.hardware.cluster.api import Json


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class PriorityClass:
    """PriorityClass of Kubernetes, ordered by priority."""

    value: int
    name: str
    is_default: bool = False


def read_priority_classes(get: Callable[..., Json]) -> tuple[PriorityClass, ...]:
    """Read the cluster's priority classes, lowest first. Raises what ``get`` raises."""
    items = get("/apis/scheduling.k8s.io/v1/priorityclasses").get("items") or []
    return tuple(
        sorted(
            PriorityClass(
                value=int(item["value"]),
                name=str(item["metadata"]["name"]),
                is_default=bool(item.get("globalDefault")),
            )
            for item in items
        )
    )


def default_priority_class(get: Callable[..., Json]) -> str:
    """Return the default priority class; empty if the cluster has none."""
    # Kubernetes uses the lowest of several defaults (admission plugin Priority)
    return next((item.name for item in read_priority_classes(get) if item.is_default), "")
