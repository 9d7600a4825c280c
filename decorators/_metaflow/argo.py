"""Changes to the Argo workflows that Metaflow compiles: retries and cleanup.

Rules of Argo Workflows 3.5 and newer (its docs/retries.md and docs/fields.md). ``backoff.maxDuration``
counts from the start of the first attempt and becomes the deadline of later pods, so none is set.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import yaml
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY

from decorators._metaflow.api_retries import limit_requests
from decorators._metaflow.retries import retries_failures

KEPT_S = 7 * 24 * 3600  # retention of finished workflows and failed pods; Metaflow keeps artifacts and logs
BACKOFF = {"duration": "2m", "factor": 2}  # 2, 4, 8 and 16 minutes
# Reason of a JobSet that ended by its failure policy, which here has one rule: a user error
USER_ERROR_REASON = "FailJobSetFailurePolicyAction"
# "-1": the container left no exit code; 137 and 143: it was killed, or ended by SIGTERM
_LOST = "lastRetry.status == 'Error' || lastRetry.exitCode in ['-1', '137', '143']"
_FAILED = f"lastRetry.exitCode != '{METAFLOW_EXIT_DISALLOW_RETRY}'"
_JOBSET_FAILED = f"!(lastRetry.message contains '{USER_ERROR_REASON}')"
_CONDITIONS = 4  # number of JobSet conditions searched for the reason; Argo can address them only by index
_WORKERS = "{{=asInt(inputs.parameters.workerCount)}}"
_original_compile: Callable[[Any], Any] | None = None


def compile_workflows(remove_older: str, pending_s: Callable[[], float]) -> None:
    """Patch Metaflow to compile workflows that retry lost steps and are deleted after they finish.

    Without it finished workflows and their pods stay in the cluster until someone deletes them.

    Parameters
    ----------
    remove_older:
        Python source that deletes the JobSets of earlier attempts. Runs before each retry on several nodes;
        its arguments are the attempt and a label selector of those JobSets.
    pending_s:
        Returns the seconds that a step's pods may wait for nodes.
    """
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    global _original_compile
    _original_compile = original = _original_compile or ArgoWorkflows._compile_workflow_template

    def compile_workflow_template(self: Any) -> Any:
        template = original(self)
        spec = template.payload["spec"]
        spec["ttlStrategy"] = {"secondsAfterCompletion": KEPT_S}
        spec["podGC"] = {"strategy": "OnPodSuccess"}  # failed pods are kept for debugging
        steps = {self._sanitize(node.name): node.name for node in self.graph}
        for step in spec["templates"]:
            if resource := step.get("resource"):
                _complete_jobset(step, resource, pending_s(), remove_older)
            if strategy := step.get("retryStrategy"):
                strategy["backoff"] = dict(BACKOFF)
                retried = retries_failures(steps.get(step["name"], ""))
                strategy["expression"] = _JOBSET_FAILED if resource else _FAILED if retried else _LOST
        return template

    ArgoWorkflows._compile_workflow_template = compile_workflow_template
    _change_client()


def _change_client() -> None:
    """Patch Metaflow's client: scheduled workflows do not overlap, and every request has a time limit."""
    from metaflow.plugins.argo.argo_client import ArgoClient

    original, connect = ArgoClient.schedule_workflow_template, ArgoClient.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(connect)
    def connect_with_limit(self: Any, *values: Any, **options: Any) -> None:
        connect(self, *values, **options)
        limit_requests()  # needs the package kubernetes, whose absence Metaflow has reported before

    @functools.wraps(original)
    def schedule(self: Any, name: str, *values: Any, **options: Any) -> None:
        original(self, name, *values, **options)
        workflow = self.get_cronworkflow(name)
        if workflow is not None and workflow["spec"].get("concurrencyPolicy") != "Forbid":
            workflow["spec"]["concurrencyPolicy"] = "Forbid"
            location = {"group": self._group, "version": self._version, "namespace": self._namespace}
            api = self._client.get().CustomObjectsApi()
            api.replace_namespaced_custom_object(**location, plural="cronworkflows", name=name, body=workflow)

    ArgoClient.__init__ = connect_with_limit
    ArgoClient.schedule_workflow_template = schedule


def _complete_jobset(
    template: dict[str, Any], resource: dict[str, Any], pending_s: float, remove_older: str
) -> None:
    """Make the JobSet of a multi-node step end after a user error, at its deadline, with its workflow, and
    before its retry.
    """
    jobset = yaml.safe_load(resource["manifest"].replace(_WORKERS, f"'{_WORKERS}'"))
    spec = jobset["spec"]
    spec["failurePolicy"] = {
        "maxRestarts": 0,  # Argo starts the next attempt
        "rules": [{"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    spec["ttlSecondsAfterFinished"] = KEPT_S
    container: dict[str, Any] = {}
    for job in spec["replicatedJobs"]:
        pod_job = job["template"]["spec"]
        codes = {"operator": "In", "values": [METAFLOW_EXIT_DISALLOW_RETRY]}
        pod_job["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        pod = pod_job["template"]["spec"]
        pod_job["activeDeadlineSeconds"] = int(pod["activeDeadlineSeconds"] + pending_s)
        container = {
            "name": "remove-older-jobsets",
            "image": pod["containers"][0]["image"],
            "command": ["python", "-c", remove_older],
        }
        resource_patch = {"imagePullSecrets": pod.get("imagePullSecrets") or []}
        resource_patch |= {key: pod[key] for key in ("priorityClassName",) if key in pod}
    resource["manifest"] = yaml.dump(jobset, default_flow_style=False, indent=2).replace(
        f"'{_WORKERS}'", _WORKERS
    )
    resource["setOwnerReference"] = True  # deleting the workflow deletes its JobSet
    reasons = [f"status.conditions.{n}.reason == {USER_ERROR_REASON}" for n in range(_CONDITIONS)]
    resource["failureCondition"] = ", ".join([*reasons, resource["failureCondition"]])
    if "retryStrategy" in template:
        selector = "task_id_entropy={{inputs.parameters.task-id-entropy}}"
        container["args"] = ["{{inputs.parameters.retryCount}}", selector]
        template["initContainers"] = [container]
    template["podSpecPatch"] = json.dumps(resource_patch)
