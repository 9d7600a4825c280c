"""What Kubernetes refuses is said in two lines, with what to do, and never as a traceback."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiException
from metaflow.plugins.kubernetes.kubernetes_job import KubernetesJobException
from urllib3.exceptions import MaxRetryError, NewConnectionError

from decorators import _metaflow
from decorators._metaflow import WaitedJob, patience
from decorators.backends import oom_kills
from decorators.backends.kubernetes import errors
from launchers.replanning import Replanning, plans_of
from launchers.store.bundles import LocalStorage

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
        (
            404,
            "the server could not find the requested resource",
            "could not find",
            "JobSet is not installed",
        ),
        (404, 'namespaces "none" not found', '"none" not found', "METAFLOW_KUBERNETES_NAMESPACE"),
        (422, "spec.hostname: Invalid value", "Invalid value", "kubectl get events"),
    ],
)
def test_a_refusal_is_the_servers_words_and_what_to_do(
    status: int, message: str, problem: str, advice: str
) -> None:
    found = errors.explain(answer(status, message), "")
    assert problem in found.problem
    assert advice in found.advice
    assert "\n" not in found.problem + found.advice


def test_the_answer_inside_of_metaflows_own_exception_is_found() -> None:
    try:
        try:
            raise answer(403, FORBIDDEN)
        except ApiException:
            raise KubernetesJobException("Unable to launch Kubernetes job.")  # noqa: B904 - as Metaflow does
    except KubernetesJobException as error:
        found = errors.explain(error, "")
    assert "cannot create resource" in found.problem


def test_a_server_that_does_not_answer_is_told_from_one_that_refuses() -> None:
    broken = NewConnectionError(None, "Failed to establish a new connection: [Errno 111] Connection refused")  # type: ignore[arg-type]
    found = errors.explain(MaxRetryError(None, "/apis", broken), "")  # type: ignore[arg-type]
    assert found.problem.startswith("The Kubernetes API can't be reached")
    assert "Connection refused" in found.problem


def test_what_goes_on_unwatched_is_named_with_the_command_that_ends_it() -> None:
    found = errors.explain(answer(401, "Unauthorized"), "jobset js-1 in namespace finetune")
    assert "kubectl delete jobset js-1 -n finetune" in found.advice


class Pods:
    """An API that has these pods, in the place of ClusterApi."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = pods

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get(self, path: str, timeout_s: float, **query: str) -> dict[str, Any]:
        assert timeout_s > 0
        assert (path, query["labelSelector"]) == (
            "/api/v1/namespaces/n/pods",
            "jobset.sigs.k8s.io/jobset-name=js-1",
        )
        return {"items": list(self.pods)}


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"nodeName": "node-a"}, "status": status}


def test_each_pod_that_has_failed_says_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = pod("w-0", phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    log = "ModuleNotFoundError: No module named 'torch'\n[save_logs] upload_success\n"
    state = {"terminated": {"reason": "Error", "exitCode": 1, "message": log}}
    crashed = pod("w-1", phase="Failed", containerStatuses=[{"state": state}])
    pods = Pods(evicted, crashed, pod("w-2", phase="Running"))
    monkeypatch.setattr(errors, "ClusterApi", lambda: pods)
    job = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")
    assert errors.failed_pods(job) == [
        "pod w-0 on node-a has failed: Evicted: The node was low on resource: memory.",
        "pod w-1 on node-a has failed: Error (exit code 1): ModuleNotFoundError: No module named 'torch'",
    ]


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replanning:
    """What the attempts of run 7 leave; this process waits for its step train's attempt 1."""
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(oom_kills, "datastore", lambda: storage)
    monkeypatch.setattr(_metaflow, "waited_attempt", lambda: ("7", "train", 1))
    return Replanning(storage=storage, prefix=plans_of("7"))


def test_a_pod_that_is_killed_as_a_whole_for_want_of_memory_is_noted_for_the_next_attempt(
    plans: Replanning, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(name: str, reason: str, code: int) -> dict[str, Any]:
        state = {"terminated": {"reason": reason, "exitCode": code}}
        return pod(name, phase="Failed", containerStatuses=[{"state": state}])

    job = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")
    monkeypatch.setattr(errors, "ClusterApi", lambda: Pods(ended("w-0", "Error", 137)))
    errors.failed_pods(job)
    assert plans.kill_of("train", 1) is None
    both = Pods(ended("w-0", "Error", 1), ended("w-1", "OOMKilled", 137))
    monkeypatch.setattr(errors, "ClusterApi", lambda: both)
    assert errors.failed_pods(job)[1] == "pod w-1 on node-a has failed: OOMKilled (exit code 137)"
    assert plans.kill_of("train", 1) == "pod w-1"
    assert plans.kill_of("train", 0) is None


class Jobs:
    """Stands where boto3's Batch client does."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons

    def describe_jobs(self, jobs: list[str]) -> dict[str, Any]:
        records = zip(jobs, self.reasons, strict=True)
        return {"jobs": [{"jobId": name, "container": {"reason": reason}} for name, reason in records]}


KILLED = "OutOfMemoryError: Container killed due to memory usage"


@pytest.mark.parametrize(
    ("info", "client", "what"),
    [
        ({"container": {"reason": KILLED}}, Jobs(), "batch job b-1"),
        ({"container": {"exitCode": 1}, "attempts": [{"container": {"exitCode": 1}}]}, Jobs(), None),
        ({"attempts": [{"container": {"reason": KILLED}}]}, Jobs(), "batch job b-1"),
        ({"nodeProperties": {"numNodes": 2}}, Jobs("", KILLED), "batch job b-1#1"),
        ({"nodeProperties": {"numNodes": 2}}, Jobs("", ""), None),
    ],
)
def test_a_container_of_batch_that_is_killed_for_want_of_memory_is_found_on_any_node(
    info: dict[str, Any], client: Jobs, what: str | None
) -> None:
    job = WaitedJob(
        backend="batch", kind="batch job", name="b-1", client=client, info={"jobId": "b-1", **info}
    )
    assert oom_kills.in_batch_job(job) == what


def test_a_note_that_cannot_be_kept_hides_nothing(
    plans: Replanning, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("no datastore")

    monkeypatch.setattr(oom_kills, "datastore", broken)
    oom_kills.note("pod w-1")
    assert "pod w-1 ran out of memory" in capsys.readouterr().err


class Asked:
    """Stands where Metaflow's RunningJobSet does: each question is answered by the next of these."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self._client, self.renewed = list(answers), self, 0

    def _refresh_client(self) -> None:
        self.renewed += 1

    def fetch(self) -> Any:
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


GONE = MaxRetryError(None, "/apis")  # type: ignore[arg-type]


def test_a_server_that_goes_comes_back_and_takes_a_while_to_know_its_users_is_asked_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    asked = Asked("first", GONE, GONE, answer(503, "starting"), answer(403, FORBIDDEN), "second")
    patient = patience.with_patience(Asked.fetch)
    assert patient(asked) == "first"
    assert patient(asked) == "second"
    said = capsys.readouterr().err
    assert said.count("The Kubernetes API doesn't answer; asking on for 5 minutes.") == 1


def test_a_login_is_read_anew_while_the_server_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    asked = Asked(answer(401, "Unauthorized"), answer(401, "Unauthorized"), "then")
    assert patience.with_patience(Asked.fetch)(asked) == "then"
    assert asked.renewed == 2


@pytest.mark.parametrize("error", [answer(403, FORBIDDEN), answer(404, "not found")])
def test_what_is_refused_at_once_is_not_asked_again(error: ApiException) -> None:
    with pytest.raises(ApiException):
        patience.with_patience(Asked.fetch)(Asked(error))


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_patience_s", 0.0)
    with pytest.raises(MaxRetryError):
        patience.with_patience(Asked.fetch)(Asked(GONE))
