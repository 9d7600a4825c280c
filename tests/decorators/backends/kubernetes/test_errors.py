"""Errors of Kubernetes are reported in two lines with advice, never as a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.client import ApiException
from metaflow.plugins.kubernetes.kubernetes_job import KubernetesJobException
from urllib3.exceptions import MaxRetryError, NewConnectionError

from decorators._metaflow import WaitedJob
from decorators.backends.kubernetes import errors

FORBIDDEN = 'jobs.batch is forbidden: User "ann" cannot create resource "jobs" in API group "batch"'
QUOTA = 'jobsets "js-1" is forbidden: exceeded quota: small, requested: count/jobsets=1, used: 1, limited: 1'


def answer(status: int, message: str) -> ApiException:
    error = ApiException(status=status, reason="as HTTP says")
    error.body = json.dumps({"kind": "Status", "message": message})
    return error


@pytest.mark.parametrize(
    ("status", "message", "problem", "advice"),
    [
        (403, FORBIDDEN, "cannot create resource", "rbac-launcher.yaml"),
        (403, QUOTA, "exceeded quota: small", "kubectl describe resourcequota"),
        (401, "Unauthorized", "has expired", "Log in again"),
        (404, "the server could not find the requested resource", "could not find", "Install JobSet"),
        (404, 'namespaces "none" not found', '"none" not found', "METAFLOW_KUBERNETES_NAMESPACE"),
        (422, "spec.hostname: Invalid value", "Invalid value", "kubectl get events"),
    ],
)
def test_a_refusal_has_the_message_of_the_server_and_advice(
    status: int, message: str, problem: str, advice: str
) -> None:
    explanation = errors.explain(answer(status, message), "")
    assert problem in explanation.problem
    assert advice in explanation.advice
    assert "\n" not in explanation.problem + explanation.advice


def test_an_api_error_wrapped_in_a_metaflow_exception_is_found() -> None:
    try:
        try:
            raise answer(403, FORBIDDEN)
        except ApiException:
            raise KubernetesJobException("Unable to launch Kubernetes job.")  # noqa: B904 - as Metaflow does
    except KubernetesJobException as error:
        explanation = errors.explain(error, "")
    assert "cannot create resource" in explanation.problem


def test_an_unreachable_server_is_distinguished_from_a_refusal() -> None:
    broken = NewConnectionError(None, "Failed to establish a new connection: [Errno 111] Connection refused")  # type: ignore[arg-type]
    explanation = errors.explain(MaxRetryError(None, "/apis", broken), "")  # type: ignore[arg-type]
    assert explanation.problem.startswith("The Kubernetes API cannot be reached")
    assert "Connection refused" in explanation.problem


def test_a_job_left_running_is_named_with_the_command_that_deletes_it() -> None:
    explanation = errors.explain(answer(401, "Unauthorized"), "jobset js-1 in namespace finetune")
    assert "kubectl delete jobset js-1 -n finetune" in explanation.advice


class Pods:
    """A replacement for ClusterApi that returns these pods."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = pods

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get(self, path: str, **query: str) -> dict[str, Any]:
        assert (path, query["labelSelector"]) == (
            "/api/v1/namespaces/n/pods",
            "jobset.sigs.k8s.io/jobset-name=js-1",
        )
        return {"items": list(self.pods)}


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"nodeName": "node-a"}, "status": status}


def test_each_failed_pod_is_described_with_its_node_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = pod("w-0", phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    log = "ModuleNotFoundError: No module named 'torch'\n[save_logs] upload_success\n"
    state = {"terminated": {"reason": "Error", "exitCode": 1, "message": log}}
    crashed = pod("w-1", phase="Failed", containerStatuses=[{"state": state}])
    pods = Pods(evicted, crashed, pod("w-2", phase="Running"))
    monkeypatch.setattr(errors, "ClusterApi", lambda: pods)
    job = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")
    assert errors.failed_pods(job) == [
        "pod w-0 on node-a failed: Evicted: The node was low on resource: memory.",
        "pod w-1 on node-a failed: Error (exit code 1): ModuleNotFoundError: No module named 'torch'",
    ]
