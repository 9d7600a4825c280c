"""Reasons why a job has not started, from a real scheduler and job controller, and its removal."""

from __future__ import annotations

from typing import Any

import pytest

from decorators._metaflow import WaitedJob
from decorators.backends.interface import WaitState
from decorators.backends.kubernetes import waiting
from tests.lab.api import Json
from tests.lab.control_plane import ControlPlane, wait_for

SIZES = {"control": 1, "worker": 2}  # a gang of three nodes, as Metaflow submits it
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> str:
    return control_plane.namespace(f"w{abs(hash(request.node.name)) % 10**8}")


@pytest.fixture
def submit(control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Create a Job with this pod; return the object that Metaflow would wait for."""
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig()))

    def submit_pod(name: str, limits: dict[str, str], **pod: Any) -> WaitedJob:
        container = {"name": "c", "image": "i", "resources": {"limits": limits}}
        spec = {"restartPolicy": "Never", "containers": [container], **pod}
        control_plane.api().create(
            f"/apis/batch/v1/namespaces/{namespace}/jobs",
            {"metadata": {"name": name}, "spec": {"template": {"spec": spec}}},
        )
        return WaitedJob(backend="kubernetes", kind="job", name=name, namespace=namespace)

    return submit_pod


def _state(job: WaitedJob, pending_reason: str) -> WaitState:
    """Wait until the state has the message and return it."""

    def reported() -> WaitState | None:
        state = waiting.wait_state(job)
        return state if pending_reason in state.reason else None

    pod_state: WaitState = wait_for(
        reported, 60, f"{pending_reason!r} is reported: {waiting.wait_state(job)}", every=0.5
    )
    return pod_state


@pytest.mark.slow
def test_the_reason_of_the_scheduler_is_shown_and_removal_leaves_no_pod(
    submit: Any, control_plane: ControlPlane, namespace: str
) -> None:
    job = submit("wants-gpus", {"nvidia.com/gpu": "8"})
    assert _state(job, "nodes").pending
    waiting.remove_job(job)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    wait_for(lambda: not control_plane.api().items(pods), 60, "no pod is left")
    waiting.remove_job(job)  # once more does no harm


@pytest.mark.slow
def test_an_exhausted_quota_is_shown_as_the_reason(
    submit: Any, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("create", "quota", "none", "--hard=pods=0", "-n", namespace)
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/none"
    wait_for(lambda: control_plane.api().get(path).get("status", {}).get("hard"), 60, "the quota counts")
    job = submit("over", {"cpu": "1"})
    assert "none" in _state(job, "exceeded quota").reason


@pytest.mark.slow
def test_a_permanent_refusal_of_the_pod_ends_the_wait_at_once(
    submit: Any, control_plane: ControlPlane, namespace: str
) -> None:
    limits = {"limits": [{"type": "Container", "max": {"cpu": "1"}}]}
    path = f"/api/v1/namespaces/{namespace}/limitranges"
    control_plane.api().create(path, {"metadata": {"name": "small"}, "spec": limits})
    state = _state(submit("large", {"cpu": "4"}), "maximum cpu usage per Container is 1")
    assert (state.permanent_failure.kind, state.permanent_failure.grace_period_s) == ("admission", 0)


@pytest.mark.parametrize(
    ("expected", "for_good"),
    [
        ('pods "j-x" is forbidden: violates PodSecurity "restricted:latest": seccompProfile', True),
        ('admission webhook "policy.example" denied the request: no such image', True),
        ("pods is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", True),
        ('pods "j-x" is forbidden: failed quota: few: must specify limits.cpu', True),
        ('pods "j-x" is forbidden: no PriorityClass with name highest was found', True),
        ('pods "j-x" is forbidden: exceeded quota: few, requested: pods=1, used: pods=3', False),
        ('failed calling webhook "policy.example": connection refused', False),
    ],
)
def test_only_permanent_refusals_end_the_wait(expected: str, for_good: bool) -> None:
    assert bool(waiting._PERMANENT.search(f"Error creating: {expected}")) is for_good


@pytest.mark.slow
def test_a_missing_service_account_is_shown_as_the_reason(submit: Any) -> None:
    job = submit("nobody", {"cpu": "1"}, serviceAccountName="nobody")
    assert 'serviceaccount "nobody" not found' in _state(job, "nobody").reason


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_is_permanent_after_a_grace_period(
    submit: Any, control_plane: ControlPlane, namespace: str
) -> None:
    job = submit("image", {"cpu": "1"})
    pods = f"/api/v1/namespaces/{namespace}/pods"
    pod: Json = wait_for(lambda: control_plane.api().items(pods), 60, "the pod is made")[0]
    pulling = {"reason": "ErrImagePull", "message": "manifest unknown"}
    status = {"name": "c", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    control_plane.api().patch(
        f"{pods}/{pod['metadata']['name']}/status",
        {"status": {"containerStatuses": [{**status, "state": {"waiting": pulling}}]}},
    )
    pod_state = _state(job, "ErrImagePull")
    assert (pod_state.reason, pod_state.permanent_failure.grace_period_s) == (
        "ErrImagePull (i): manifest unknown",
        120,
    )


@pytest.mark.slow
def test_a_jobset_waits_until_each_of_its_pods_has_started(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig()))
    api, container = control_plane.api(), {"name": "c", "image": "i"}
    template = {"spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}}
    parts = [{"name": name, "replicas": number, "template": template} for name, number in SIZES.items()]
    api.create(
        f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": "js"},
            "spec": {"replicatedJobs": parts},
        },
    )
    job = WaitedJob(backend="kubernetes", kind="jobset", name="js", namespace=namespace)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    names = [f"js-{number}" for number in range(sum(SIZES.values()))]
    for started, name in enumerate(names):
        state = waiting.wait_state(job)
        assert (state.pending, state.running, state.nodes) == (True, started, len(names))
        labels = {"jobset.sigs.k8s.io/jobset-name": "js"}
        api.create(pods, {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}})
        assert waiting.wait_state(job).missing == (name,)
        api.patch(f"{pods}/{name}/status", {"status": {"phase": "Running"}})
    assert not waiting.wait_state(job).pending


@pytest.mark.slow
def test_an_unreachable_api_does_not_end_the_wait(
    submit: Any, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("unseen", {"cpu": "1"})
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig(server="https://127.0.0.1:9")))
    state = waiting.wait_state(job)
    assert state.pending
    assert "is unavailable" in state.reason
    assert state.permanent_failure is None
