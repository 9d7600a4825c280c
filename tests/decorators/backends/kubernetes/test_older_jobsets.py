"""Removal of earlier attempts' JobSets before the next attempt, on a real API server."""

from __future__ import annotations

import ssl
import urllib.error

import pytest

from decorators.backends.kubernetes.older_jobsets import main, remove
from tests.lab.api import Json
from tests.lab.control_plane import ControlPlane, wait_for

ENTROPY = "task_id_entropy"


def jobset(name: str, entropy: str) -> Json:
    pod = {"restartPolicy": "Never", "containers": [{"name": "train", "image": "none"}]}
    job = {"name": "worker", "replicas": 1, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {ENTROPY: entropy}},
        "spec": {"replicatedJobs": [job]},
    }


@pytest.mark.slow
def test_jobsets_of_earlier_attempts_are_deleted_and_others_kept(
    control_plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    space = control_plane.namespace("older-jobsets")
    api, path = control_plane.api(), f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{space}/jobsets"
    for name, entropy in (("js-ab0", "ab"), ("js-ab1", "ab"), ("js-cd0", "cd")):
        api.create(path, jobset(name, entropy))
    context = ssl.create_default_context(cafile=str(control_plane.authority))

    token = control_plane.service_account("flow", space)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        remove(control_plane.url, f"{ENTROPY}=ab", token, space, context)

    rules = [
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["list", "deletecollection"]}
    ]
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}"
    api.create(f"{roles}/roles", {"metadata": {"name": "executor"}, "rules": rules})
    account = {"kind": "ServiceAccount", "name": "flow", "namespace": space}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "executor"}
    api.create(f"{roles}/rolebindings", {"metadata": {"name": "e"}, "roleRef": role, "subjects": [account]})

    def granted() -> bool:
        """Return whether the authorizer of the API server knows the new role, which takes a few seconds."""
        try:
            remove(control_plane.url, f"{ENTROPY}=none", token, space, context)
        except urllib.error.HTTPError:
            return False
        return True

    wait_for(granted, 60, "the role is in force")
    remove(control_plane.url, f"{ENTROPY}=ab", token, space, context, poll_s=0.2)
    assert [item["metadata"]["name"] for item in api.items(path)] == ["js-cd0"]
    assert "js-ab0, js-ab1" in capsys.readouterr().out
    remove(control_plane.url, f"{ENTROPY}=ab", token, space, context)  # none is left


def test_the_first_attempt_queries_no_cluster() -> None:
    main("0", f"{ENTROPY}=ab")  # there is no service account here
