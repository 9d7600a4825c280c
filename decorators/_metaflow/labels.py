"""Labels for the jobs that Metaflow makes: it says in annotations who runs what, and none groups by those."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from decorators._metaflow.commands import command_words, deployer

LabelsOf = Callable[[str, str, str | None], dict[str, str]]


def label_jobs(labels_of: LabelsOf) -> None:
    """From now on give each Job, JobSet and pod that this process makes ``labels_of(user, flow, run)``.

    Also the pods of a workflow that this process deploys to Argo, whose runs are not known yet: run is None.
    What the user has written as a label stands.
    """
    if (command_words() or [""])[0] == "kubernetes":
        from metaflow.plugins.kubernetes.kubernetes import Kubernetes

        for name in ("create_job_object", "create_jobset"):
            own = getattr(Kubernetes, name)
            if not hasattr(own, "__wrapped__"):
                setattr(Kubernetes, name, _labelled(own, labels_of))
    elif deployer() == "argo-workflows":
        _label_workflows(labels_of)


def _labelled(own: Callable[..., Any], labels_of: LabelsOf) -> Callable[..., Any]:
    signature = inspect.signature(own)

    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments
        ours = labels_of(str(asked["user"]), str(asked["flow_name"]), str(asked["run_id"]))
        asked["labels"] = {**ours, **(asked.get("labels") or {})}
        return own(*call.args, **call.kwargs)

    return make


def _label_workflows(labels_of: LabelsOf) -> None:
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    own = ArgoWorkflows._base_kubernetes_labels
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def labels(self: Any) -> dict[str, str]:
        return {**labels_of(str(self.username), str(self.flow.name), None), **own(self)}

    ArgoWorkflows._base_kubernetes_labels = labels
