"""User, flow and run as labels of the jobs that Metaflow creates; monitoring does not group by
annotations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from decorators._metaflow.commands import command_arguments, deployer

LabelsOf = Callable[[str, str, str | None], dict[str, str]]


def label_jobs(labels_of: LabelsOf) -> None:
    """Add ``labels_of(user, flow, run)`` to each Job, JobSet and pod that this process creates.

    Also labels the pods of a workflow that is deployed to Argo; its runs are unknown, so ``run`` is None.
    Labels set by the user take precedence.
    """
    if (command_arguments() or [""])[0] == "kubernetes":
        from metaflow.plugins.kubernetes.kubernetes import Kubernetes

        for name in ("create_job_object", "create_jobset"):
            original = getattr(Kubernetes, name)
            if not hasattr(original, "__wrapped__"):
                setattr(Kubernetes, name, _labeled(original, labels_of))
    elif deployer() == "argo-workflows":
        _label_workflows(labels_of)


def _labeled(original: Callable[..., Any], labels_of: LabelsOf) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        values = call.arguments
        labels = labels_of(str(values["user"]), str(values["flow_name"]), str(values["run_id"]))
        values["labels"] = {**labels, **(values.get("labels") or {})}
        return original(*call.args, **call.kwargs)

    return make


def _label_workflows(labels_of: LabelsOf) -> None:
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    original = ArgoWorkflows._base_kubernetes_labels
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def labels(self: Any) -> dict[str, str]:
        return {**labels_of(str(self.username), str(self.flow.name), None), **original(self)}

    ArgoWorkflows._base_kubernetes_labels = labels
