"""Properties of a run's training pods that ResourceQuota scopes select by."""

from __future__ import annotations

from typing import Any

from decorators.backends.options import Options
from decorators.backends.strategic_merge import merge
from estimator.hardware.cluster.quotas import QuotaPod


def quota_pod(options: Options) -> QuotaPod:
    """Return what quota scopes depend on in a run's pods, after the user's patch of the pod template."""
    # set by Metaflow and by this package
    defaults = {"activeDeadlineSeconds": 1, "priorityClassName": options.priority_class}
    spec = merge({"spec": defaults}, dict(options.pod_template or {})).get("spec") or {}
    return QuotaPod(
        has_deadline="activeDeadlineSeconds" in spec,
        priority_class=spec.get("priorityClassName"),
        across_namespaces=_crosses(spec.get("affinity") or {}),
    )


def _crosses(value: Any) -> bool:
    """Whether an affinity refers to namespaces, by name or label, at any depth."""
    if isinstance(value, dict):
        return any(
            (name == "namespaces" and bool(limit))
            or (name == "namespaceSelector" and limit is not None)
            or _crosses(limit)
            for name, limit in value.items()
        )
    return isinstance(value, list) and any(_crosses(limit) for limit in value)
