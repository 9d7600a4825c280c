"""The API server of the tests is a real one: it authorizes, schedules, and comes back as it was."""

from __future__ import annotations

import pytest

from tests.lab.api import ApiError
from tests.lab.control_plane import ControlPlane, wait_for

pytestmark = pytest.mark.slow


def test_a_user_may_nothing_until_a_role_binding_says_so(control_plane: ControlPlane) -> None:
    namespace = control_plane.namespace("roles")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    with pytest.raises(ApiError, match="403: pods is forbidden"):
        control_plane.api("alice").items(pods)
    control_plane.kubectl("create", "role", "reader", "--verb=list", "--resource=pods", "-n", namespace)
    control_plane.kubectl("create", "rolebinding", "alice", "--role=reader", "--user=alice", "-n", namespace)
    assert wait_for(lambda: _allowed(control_plane, pods), 30, "the role counts")


def test_objects_outlast_the_api_server(control_plane: ControlPlane) -> None:
    namespace = control_plane.namespace("outlasts")
    control_plane.stop_api_server()
    assert not control_plane.api().ready()
    control_plane.start_api_server()
    assert control_plane.api().exists(f"/api/v1/namespaces/{namespace}")


def test_a_jobset_must_have_the_shape_that_its_definition_says(control_plane: ControlPlane) -> None:
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "wrong"},
        "spec": {"replicatedJobs": [{"name": "worker", "replicas": "two"}]},
    }
    with pytest.raises(ApiError, match=r"replicas.* must be of type integer"):
        control_plane.api().create("/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets", jobset)


def _allowed(control_plane: ControlPlane, path: str) -> bool:
    try:
        control_plane.api("alice").items(path)
    except ApiError:
        return False
    return True
