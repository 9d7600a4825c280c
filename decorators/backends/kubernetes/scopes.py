"""A run's training pods as ResourceQuotas with scopes see them."""

from __future__ import annotations

from typing import Any

from decorators.backends.options import Options
from decorators.backends.strategic_merge import merge
from estimator.hardware.cluster.quotas import QuotaPod


def quota_pod(options: Options) -> QuotaPod:
    """With the user's own patch of the pods in it."""
    ours = {"activeDeadlineSeconds": 1, "priorityClassName": options.priority_class}  # Metaflow's, and ours
    spec = merge({"spec": ours}, dict(options.pod_template or {})).get("spec") or {}
    return QuotaPod(
        has_deadline="activeDeadlineSeconds" in spec,
        priority_class=spec.get("priorityClassName"),
        across_namespaces=_crosses(spec.get("affinity") or {}),
    )


def _crosses(value: Any) -> bool:
    """Whether an affinity names namespaces, by name or by label, at any depth."""
    if isinstance(value, dict):
        return any(
            (name == "namespaces" and bool(each))
            or (name == "namespaceSelector" and each is not None)
            or _crosses(each)
            for name, each in value.items()
        )
    return isinstance(value, list) and any(_crosses(each) for each in value)
