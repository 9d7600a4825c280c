"""Argo workflows as Metaflow compiles them: when they retry, and what they leave behind.

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

from decorators._metaflow.retries import retries_failures

KEPT_S = 7 * 24 * 3600  # a finished workflow with its failed pods; Metaflow has artifacts and logs for longer
BACKOFF = {"duration": "2m", "factor": 2}  # 2, 4, 8 and 16 minutes
# JobSet's reason for a JobSet that ended by a rule of its failure policy; here, the rule of users' errors
USER_ERROR_REASON = "FailJobSetFailurePolicyAction"
# "-1": the container left no exit code; 137 and 143: it was killed, or ended by SIGTERM
_LOST = "lastRetry.status == 'Error' || lastRetry.exitCode in ['-1', '137', '143']"
_FAILED = f"lastRetry.exitCode != '{METAFLOW_EXIT_DISALLOW_RETRY}'"
_JOBSET_FAILED = f"!(lastRetry.message contains '{USER_ERROR_REASON}')"
_CONDITIONS = 4  # a JobSet's conditions among which the reason is looked for; Argo knows them by number only
_WORKERS = "{{=asInt(inputs.parameters.workerCount)}}"
_own_compile: Callable[[Any], Any] | None = None


def compile_workflows(remove_older: str, pending_s: Callable[[], float]) -> None:
    """From now on, compile workflows that retry lost steps, and that remove their own traces.

    Without it finished workflows and their pods stay in the cluster until someone deletes them.

    Parameters
    ----------
    remove_older:
        Python source, run before each further attempt of a step on several nodes with the attempt and a label
        selector of the earlier attempts' JobSets.
    pending_s:
        Seconds that a step's pods may wait for nodes.
    """
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    global _own_compile
    _own_compile = own = _own_compile or ArgoWorkflows._compile_workflow_template

    def compile_workflow_template(self: Any) -> Any:
        template = own(self)
        spec = template.payload["spec"]
        spec["ttlStrategy"] = {"secondsAfterCompletion": KEPT_S}
        spec["podGC"] = {"strategy": "OnPodSuccess"}  # what a failed pod tells is looked at by people
        steps = {self._sanitize(node.name): node.name for node in self.graph}
        for step in spec["templates"]:
            if resource := step.get("resource"):
                _complete_jobset(step, resource, pending_s(), remove_older)
            if strategy := step.get("retryStrategy"):
                strategy["backoff"] = dict(BACKOFF)
                strategy["expression"] = _expression(steps.get(step["name"], ""), bool(resource))
        return template

    ArgoWorkflows._compile_workflow_template = compile_workflow_template
    _forbid_overlaps()


def _forbid_overlaps() -> None:
    """From now on, a scheduled workflow does not start while the one before it is not over."""
    from metaflow.plugins.argo.argo_client import ArgoClient

    own = ArgoClient.schedule_workflow_template
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def schedule(self: Any, name: str, *values: Any, **more: Any) -> None:
        own(self, name, *values, **more)
        workflow = self.get_cronworkflow(name)
        if workflow is not None and workflow["spec"].get("concurrencyPolicy") != "Forbid":
            workflow["spec"]["concurrencyPolicy"] = "Forbid"
            place = {"group": self._group, "version": self._version, "namespace": self._namespace}
            api = self._client.get().CustomObjectsApi()
            api.replace_namespaced_custom_object(**place, plural="cronworkflows", name=name, body=workflow)

    ArgoClient.schedule_workflow_template = schedule


def _expression(step: str, is_jobset: bool) -> str:
    if is_jobset:
        return _JOBSET_FAILED
    return _FAILED if retries_failures(step) else _LOST


def _complete_jobset(
    template: dict[str, Any], resource: dict[str, Any], pending_s: float, remove_older: str
) -> None:
    """Give a step on several nodes its end: of a user's error, of time, of its workflow, of its retry."""
    jobset = yaml.safe_load(resource["manifest"].replace(_WORKERS, f"'{_WORKERS}'"))
    spec = jobset["spec"]
    spec["failurePolicy"] = {
        "maxRestarts": 0,  # Argo starts the next attempt
        "rules": [{"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    spec["ttlSecondsAfterFinished"] = KEPT_S
    container: dict[str, Any] = {}
    for job in spec["replicatedJobs"]:
        made = job["template"]["spec"]
        codes = {"operator": "In", "values": [METAFLOW_EXIT_DISALLOW_RETRY]}
        made["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        pod = made["template"]["spec"]
        made["activeDeadlineSeconds"] = int(pod["activeDeadlineSeconds"] + pending_s)
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
    resource["setOwnerReference"] = True  # a workflow that is deleted takes its JobSet along
    reasons = [f"status.conditions.{n}.reason == {USER_ERROR_REASON}" for n in range(_CONDITIONS)]
    resource["failureCondition"] = ", ".join([*reasons, resource["failureCondition"]])
    if "retryStrategy" in template:
        selector = "task_id_entropy={{inputs.parameters.task-id-entropy}}"
        container["args"] = ["{{inputs.parameters.retryCount}}", selector]
        template["initContainers"] = [container]
    template["podSpecPatch"] = json.dumps(resource_patch)
