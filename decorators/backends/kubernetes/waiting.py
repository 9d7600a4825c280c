"""Reasons why a Job's or JobSet's pods have not started: scheduler, image errors, quotas, Kueue."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from decorators._metaflow import WaitedJob
from decorators.backends.interface import STARTED, PermanentFailure, WaitState
from estimator.errors import UserError
from estimator.hardware.cluster.api import ApiRefusedError, ClusterApi, Json, UnreachableError, get_or_none

VISIBILITY = "visibility.kueue.x-k8s.io"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
_BAD_IMAGE = "Check the image name and the pull secret. Show the registry's response: kubectl describe pods"
_SEE = "Show details: kubectl describe pods"
_BAD_CONFIG = "Create the missing Secret or ConfigMap. Show its name: kubectl describe pods"
_REFUSED = (
    "The cluster's policies reject the pods. Show them: kubectl describe namespace,limitrange,resourcequota"
)
# Errors with which the API server rejects a Job's pods permanently: LimitRanges, pod security, a quota of
# limits, webhooks and admission policies, invalid fields, a missing priority class. An exhausted quota or a
# webhook that does not respond is temporary.
_PERMANENT = re.compile(
    r"usage per (Container|Pod) is|violates PodSecurity|must specify |denied (the )?request|is invalid: "
    r"|no PriorityClass with name "
)
# The kubelet's reasons for a waiting container. Registry errors are tolerated for a while, a wrong name is
# not.
PERMANENT_FAILURES = {
    "InvalidImageName": PermanentFailure(kind="image name", grace_period_s=0, advice=_BAD_IMAGE),
    "ErrImageNeverPull": PermanentFailure(kind="image", grace_period_s=10, advice=_BAD_IMAGE),
    "ErrImagePull": PermanentFailure(kind="image", grace_period_s=120, advice=_BAD_IMAGE),
    "ImagePullBackOff": PermanentFailure(kind="image", grace_period_s=120, advice=_BAD_IMAGE),
    "CreateContainerConfigError": PermanentFailure(kind="config", grace_period_s=30, advice=_BAD_CONFIG),
    "CreateContainerError": PermanentFailure(kind="container", grace_period_s=30, advice=_SEE),
    "RunContainerError": PermanentFailure(kind="container", grace_period_s=30, advice=_SEE),
}


def wait_state(job: WaitedJob) -> WaitState:
    """Return whether the job's pods have started; while the API is unavailable the job counts as waiting."""
    try:
        with ClusterApi() as api:
            return _state(api, job)
    except UserError as error:  # a kubeconfig that is being rewritten
        return WaitState(pending=True, reason=error.problem)
    except (ApiRefusedError, UnreachableError) as error:
        return WaitState(pending=True, reason=f"the Kubernetes API is unavailable: {error}")


def remove_job(job: WaitedJob) -> None:
    """Delete the Job or JobSet with its pods; does nothing if it is already gone."""
    try:
        with ClusterApi() as api:
            api.delete(_path(job))
    except (ApiRefusedError, UnreachableError, UserError) as error:
        if getattr(error, "status", None) != 404:
            job.report_error(f"{job.what} cannot be removed: {error}")


def _state(api: ClusterApi, job: WaitedJob) -> WaitState:
    spec = api.get(_path(job)).get("spec") or {}
    pods = pods_of(api, job)
    missing = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"]
    running, nodes = len(pods) - len(missing), _expected(job, spec)
    if running >= nodes:
        return STARTED
    names = tuple(str(pod["metadata"]["name"]) for pod in missing)
    return replace(_waiting(api, job, spec, pods), running=running, nodes=nodes, missing=names)


def _waiting(api: ClusterApi, job: WaitedJob, spec: Json, pods: list[Json]) -> WaitState:
    """Return the reason why not all of the job's pods have started."""
    if spec.get("suspend"):
        return WaitState(pending=True, reason=_queue_problem(api, job))
    for pod in pods:
        if (state := _container_problem(pod)) is not None:
            return state
    unscheduled = [text for pod in pods if (text := _scheduling_problem(pod))]
    if unscheduled:
        return WaitState(pending=True, reason=unscheduled[0])
    if len(pods) < _expected(job, spec):
        reason = _creation_failure(api, job)
        refused = (
            PermanentFailure(kind="admission", grace_period_s=0, advice=_REFUSED)
            if _PERMANENT.search(reason)
            else None
        )
        return WaitState(pending=True, reason=reason, permanent_failure=refused)
    placed = any((pod.get("spec") or {}).get("nodeName") for pod in pods)
    return WaitState(pending=True, reason="the image is being pulled" if placed else "")


def pods_of(api: ClusterApi, job: WaitedJob) -> list[Json]:
    """Return the pods of a Job or JobSet. Raises ApiRefusedError, UnreachableError."""
    label = "jobset.sigs.k8s.io/jobset-name" if job.kind == "jobset" else "job-name"
    return _listed(api, job, "pods", labelSelector=f"{label}={job.name}")


def exists(api: ClusterApi, job: WaitedJob) -> bool:
    """Whether the Job or JobSet still exists. Raises ApiRefusedError, UnreachableError."""
    return get_or_none(api.get, _path(job)) is not None


def _path(job: WaitedJob) -> str:
    root = JOBSETS if job.kind == "jobset" else "/apis/batch/v1"
    return f"{root}/namespaces/{job.namespace}/{job.kind}s/{job.name}"


def _expected(job: WaitedJob, spec: Json) -> int:
    """Return the number of pods that the job will have."""
    if job.kind == "job":
        return 1
    return sum(int(item.get("replicas", 1)) for item in spec.get("replicatedJobs") or []) or 1


def _listed(api: ClusterApi, job: WaitedJob, resource: str, **query: str) -> list[Json]:
    return api.get(f"/api/v1/namespaces/{job.namespace}/{resource}", **query).get("items") or []


def _container_problem(pod: Json) -> WaitState | None:
    """Return why the container of a scheduled pod does not start; None if unknown."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = (status.get("state") or {}).get("waiting") or {}
        if (permanent_failure := PERMANENT_FAILURES.get(waiting.get("reason", ""))) is not None:
            message = " ".join(str(waiting.get("message") or "").split())
            image = f" ({status.get('image')})" if "mage" in waiting["reason"] else ""
            return WaitState(
                pending=True,
                reason=f"{waiting['reason']}{image}{': ' if message else ''}{message[:300]}",
                permanent_failure=permanent_failure,
            )
    return None


def _scheduling_problem(pod: Json) -> str:
    """Return the scheduler's reason for not placing the pod; empty if there is none."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _creation_failure(api: ClusterApi, job: WaitedJob) -> str:
    """Return why pods are not created, for example a quota or a missing service account."""
    try:
        events = _listed(api, job, "events", fieldSelector="type=Warning,involvedObject.kind=Job")
    except ApiRefusedError:
        return ""
    job_events = [event for event in events if _concerns(event, job)]
    newest = max(job_events, key=lambda event: str(event.get("lastTimestamp") or ""), default=None)
    return " ".join(str(newest.get("message") or "").split()) if newest is not None else ""


def _concerns(event: Any, job: WaitedJob) -> bool:
    name = str((event.get("involvedObject") or {}).get("name") or "")
    return name == job.name or (job.kind == "jobset" and name.startswith(f"{job.name}-"))


def _queue_problem(api: ClusterApi, job: WaitedJob) -> str:
    """Return Kueue's reason for holding the job back; empty if there is none."""
    try:
        version = api.get("/apis/kueue.x-k8s.io")["preferredVersion"]["groupVersion"]
        path = f"/apis/{version}/namespaces/{job.namespace}/workloads"
        workloads = api.get(path).get("items") or []
    except ApiRefusedError:
        return "suspended: not admitted by its queue yet"
    for workload in workloads:
        owners = (workload.get("metadata") or {}).get("ownerReferences") or []
        if not any(owner.get("name") == job.name for owner in owners):
            continue
        for condition in (workload.get("status") or {}).get("conditions") or []:
            if condition.get("type") == "QuotaReserved" and condition.get("status") == "False":
                queue = str((workload.get("spec") or {}).get("queueName"))
                position = _position(api, job.namespace, queue, str(workload["metadata"]["name"]))
                return f"in Kueue's queue {queue}{position}: {condition.get('message')}"
    return "suspended: not admitted by its queue yet"


def _position(api: ClusterApi, namespace: str, queue: str, workload: str) -> str:
    """Return ", position 3 of 7" from Kueue's visibility API; empty if it is off or access is denied."""
    try:
        group = get_or_none(api.get, f"/apis/{VISIBILITY}")
        if group is None:
            return ""
        version = group["preferredVersion"]["groupVersion"]
        path = f"/apis/{version}/namespaces/{namespace}/localqueues/{queue}/pendingworkloads"
        waiting = api.get(path, limit="1000").get("items") or []
    except (ApiRefusedError, UnreachableError, KeyError):
        return ""
    found = (item for item in waiting if item["metadata"]["name"] == workload)
    place = next((item.get("positionInLocalQueue", 0) for item in found), None)
    return "" if place is None else f", position {place + 1} of {len(waiting)}"
