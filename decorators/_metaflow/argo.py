"""What a flow that is deployed to Argo Workflows leaves behind, and how it tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEPT_S = 7 * 24 * 3600  # a finished workflow with its failed pods; Metaflow has artifacts and logs for longer
LONGEST_RETRY = "1h"  # what Argo's back-off for a step may add up to
_own_compile: Callable[[Any], Any] | None = None


def tidy_workflows() -> None:
    """From now on, let compiled workflows end their own traces, and wait longer before each further attempt.

    Without it finished workflows and their pods stay in the cluster until somebody deletes them.
    """
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    global _own_compile
    _own_compile = own = _own_compile or ArgoWorkflows._compile_workflow_template

    def compile_workflow_template(self: Any) -> Any:
        template = own(self)
        spec = template.payload["spec"]
        spec["ttlStrategy"] = {"secondsAfterCompletion": KEPT_S}
        spec["podGC"] = {"strategy": "OnPodSuccess"}  # what a failed pod tells is looked at by people
        for step in spec["templates"]:
            if strategy := step.get("retryStrategy"):
                strategy["backoff"] = {**strategy["backoff"], "factor": 2, "maxDuration": LONGEST_RETRY}
        return template

    ArgoWorkflows._compile_workflow_template = compile_workflow_template
