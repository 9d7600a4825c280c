"""The row of a preflight that speaks of the training pods' priority class."""

from __future__ import annotations

from collections.abc import Mapping

from decorators.backends.kubernetes.nodes import Preflight
from estimator.hardware.cluster_priorities import read_priority_classes


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
