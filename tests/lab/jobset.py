"""The part of the JobSet controller that Metaflow needs: child Jobs, DNS names, start order, completion.

The Jobs themselves are run by the real controller. A pod that is deleted while it runs counts as failed, as
it does since Kubernetes tracks a Job's pods by finalizers (1.26); the other one that a 1.20 Job starts then
is taken away at once.
"""

from __future__ import annotations

import copy
from pathlib import Path

from tests.lab.agent import Agent
from tests.lab.api import Api, Json

_GROUP = "jobset.sigs.k8s.io"
_API = "/apis/jobset.x-k8s.io/v1alpha2"
_COUNTS = ("ready", "succeeded", "failed", "active", "suspended")


class JobSets(Agent):
    """The controller, for all namespaces."""

    def __init__(self, api: Api, log: Path) -> None:
        super().__init__("jobset", log)
        self._api = api
        self._pods: dict[str, set[str]] = {}  # a Job's uid: its pods' uids, those that are gone too

    def reconcile(self) -> None:
        for jobset in self._api.items(f"{_API}/jobsets"):
            if not jobset["metadata"].get("deletionTimestamp") and not _terminal(jobset):
                self._advance(jobset)

    def _advance(self, jobset: Json) -> None:
        namespace, name = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
        selector = f"{_GROUP}/jobset-name={name}"
        jobs = self._api.items(f"/apis/batch/v1/namespaces/{namespace}/jobs", labelSelector=selector)
        pods = self._api.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        if not jobset.get("status", {}).get("replicatedJobsStatus"):
            self._make_service(jobset)
        in_order = jobset["spec"].get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder"
        counts, waiting = [], False
        for replicated in jobset["spec"]["replicatedJobs"]:
            owned = [job for job in jobs if _label(job, "replicatedjob-name") == replicated["name"]]
            if not waiting:
                self._make_jobs(jobset, replicated, {job["metadata"]["name"] for job in owned})
            count = self._count(replicated["name"], owned, pods)
            counts.append(count)
            waiting = in_order and count["ready"] + count["succeeded"] < replicated["replicas"]
        self._report(jobset, counts, jobs)

    def _make_service(self, jobset: Json) -> None:
        name = jobset["metadata"]["name"]
        service = {
            "metadata": {"name": name, "ownerReferences": [_owner(jobset)]},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {f"{_GROUP}/jobset-name": name},
            },
        }
        path = f"/api/v1/namespaces/{jobset['metadata']['namespace']}/services"
        if not self._api.exists(f"{path}/{name}"):
            self._api.create(path, service)

    def _make_jobs(self, jobset: Json, replicated: Json, taken_names: set[str]) -> None:
        for index in range(replicated["replicas"]):
            job = _child(jobset, replicated, index)
            if job["metadata"]["name"] not in taken_names:
                self._api.create(f"/apis/batch/v1/namespaces/{jobset['metadata']['namespace']}/jobs", job)
                self.write_log(f"created {job['metadata']['name']}")

    def _count(self, name: str, jobs: list[Json], pods: list[Json]) -> Json:
        count: Json = {"name": name, **dict.fromkeys(_COUNTS, 0)}
        for job in jobs:
            owned = [pod for pod in pods if _label(pod, "job-key") == _label(job, "job-key")]
            pods_of_job = self._pods.setdefault(job["metadata"]["uid"], set())
            living = {pod["metadata"]["uid"] for pod in owned if not pod["metadata"].get("deletionTimestamp")}
            lost = pods_of_job - living
            if lost:
                self._remove([pod for pod in owned if pod["metadata"]["uid"] in living - pods_of_job])
            else:
                pods_of_job |= living
            status = job.get("status", {})
            if status.get("succeeded"):
                count["succeeded"] += 1
            elif lost or _condition(job, "Failed"):
                count["failed"] += 1
            elif status.get("active"):
                count["active"] += 1
                count["ready"] += any(pod["status"].get("phase") == "Running" for pod in owned)
        return count

    def _remove(self, pods: list[Json]) -> None:
        for pod in pods:
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
            self._api.delete(path, gracePeriodSeconds=0)

    def _report(self, jobset: Json, counts: list[Json], jobs: list[Json]) -> None:
        replicas = {each["name"]: each["replicas"] for each in jobset["spec"]["replicatedJobs"]}
        status: Json = {"replicatedJobsStatus": counts, "restarts": 0, "restartsCountTowardsMax": 0}
        if any(count["failed"] for count in counts):
            status |= _ending("Failed", "FailedJobs", "jobset failed due to one or more job failures")
        elif all(count["succeeded"] == replicas[count["name"]] for count in counts):
            status |= _ending("Completed", "AllJobsCompleted", "jobset completed successfully")
        path = f"{_API}/namespaces/{jobset['metadata']['namespace']}/jobsets/{jobset['metadata']['name']}"
        if status != {key: jobset.get("status", {}).get(key) for key in status}:
            self._api.patch(f"{path}/status", {"status": status})
        if "terminalState" in status:
            for job in jobs:
                if not _condition(job, "Complete") and not _condition(job, "Failed"):
                    self._api.delete(_path(job), propagationPolicy="Background")


def _child(jobset: Json, replicated: Json, index: int) -> Json:
    owner, kind = jobset["metadata"], replicated["name"]
    name = f"{owner['name']}-{kind}-{index}"
    marks = {
        f"{_GROUP}/jobset-name": owner["name"],
        f"{_GROUP}/jobset-uid": owner["uid"],
        f"{_GROUP}/replicatedjob-name": kind,
        f"{_GROUP}/replicatedjob-replicas": str(replicated["replicas"]),
        f"{_GROUP}/job-index": str(index),
        f"{_GROUP}/job-key": name,
        f"{_GROUP}/restart-attempt": "0",
    }
    job: Json = copy.deepcopy(replicated["template"])
    template = job["spec"]["template"]
    for part in (job, template):
        metadata = part["metadata"] = part.get("metadata") or {}
        metadata.pop("creationTimestamp", None)
        metadata["labels"] = {**(metadata.get("labels") or {}), **marks}
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **marks}
    job["metadata"] |= {"name": name, "ownerReferences": [_owner(jobset)]}
    # An indexed Job's pods are called so; 1.20 has no such Jobs.
    template["spec"]["hostname"] = f"{name}-0"
    template["spec"].setdefault("subdomain", owner["name"])
    return job


def _owner(jobset: Json) -> Json:
    return {
        "apiVersion": jobset["apiVersion"],
        "kind": "JobSet",
        "name": jobset["metadata"]["name"],
        "uid": jobset["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _path(job: Json) -> str:
    return f"/apis/batch/v1/namespaces/{job['metadata']['namespace']}/jobs/{job['metadata']['name']}"


def _label(thing: Json, name: str) -> str | None:
    label: str | None = thing["metadata"].get("labels", {}).get(f"{_GROUP}/{name}")
    return label


def _condition(thing: Json, kind: str) -> bool:
    conditions = thing.get("status", {}).get("conditions") or []
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def _terminal(jobset: Json) -> bool:
    return bool(jobset.get("status", {}).get("terminalState"))


def _ending(kind: str, reason: str, message: str) -> Json:
    condition = {"type": kind, "status": "True", "reason": reason, "message": message}
    condition["lastTransitionTime"] = "2000-01-01T00:00:00Z"  # of no meaning to a test
    return {"terminalState": kind, "conditions": [condition]}
