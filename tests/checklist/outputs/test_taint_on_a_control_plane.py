"""Taints on nodes of a real Kubernetes API server, with the roles of infra/kubernetes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from checklist.outputs import taint
from checklist.outputs.publish import Outputs, check, publish
from checklist.outputs.taint import EFFECT, KEY, LABEL
from checklist.verdict import judge
from flows.cluster_check import gate
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs
from tests.lab.control_plane import ControlPlane, wait_for

pytestmark = pytest.mark.slow
ROLES = Path(__file__).parents[3] / "infra" / "kubernetes" / "base" / "rbac-checklist.yaml"
SHARE = {2: 0.25}
SICK = judge(with_pairs(gpu_run(8), Cluster(nodes=8, speed=45, transmit=SHARE, receive=SHARE)))


@pytest.fixture
def server(control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """The API server with eight nodes and the user alice."""
    names = [f"host-{number}" for number in range(8)]
    control_plane.apply(*({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in names))
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig("alice")))
    yield control_plane
    control_plane.kubectl("delete", "node", *names)
    control_plane.kubectl(
        "delete", "clusterrole,clusterrolebinding", "test-node-marker", "--ignore-not-found"
    )


def allow(server: ControlPlane) -> None:
    """Give alice the rights of the service account of the checklist."""
    role, binding = (copy.deepcopy(item) for item in yaml.safe_load_all(ROLES.read_text()))
    role["metadata"]["name"] = binding["metadata"]["name"] = binding["roleRef"]["name"] = "test-node-marker"
    binding["subjects"] = [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}]
    server.apply(role, binding)


def node(server: ControlPlane) -> dict[str, Any]:
    node_object: dict[str, Any] = server.api().get("/api/v1/nodes/host-2")
    return node_object


def own_taints(server: ControlPlane) -> list[dict[str, str]]:
    return [item for item in node(server)["spec"].get("taints") or [] if item["key"] == KEY]


def after_concurrent_change(server: ControlPlane) -> Callable[..., None]:
    """Change the node once right before Cluster.patch, as a concurrent writer does."""
    original_patch, todo = taint.Cluster.patch, ["label"]

    def patch(self: taint.Cluster, change: taint.NodeChange, how: taint.MarkKind) -> None:
        if todo:
            server.kubectl(todo.pop(), "node", change.node.name, "somebody=else")
        original_patch(self, change, how)

    return patch


def test_taints_need_the_infra_role_and_are_set_respected_by_training_and_removed(
    server: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(mark="taint", apply=True)
    (line,) = check(outputs)
    assert line.startswith(
        "Nodes could not be marked now. This account may not list the nodes of the cluster."
    )
    (report,) = publish(SICK, outputs)
    assert report.failed
    assert "This account may not list the nodes of the cluster." in report.lines[0]

    allow(server)
    wait_for(lambda: check(outputs) == (), 60, "the role counts")
    (report,) = publish(SICK, outputs)
    assert not report.failed, report.lines
    assert own_taints(server) == [{"key": KEY, "value": "true", "effect": EFFECT}]
    assert "host-2 is slow" in node(server)["metadata"]["annotations"][KEY]
    checked = gate.Checked(run="ChecklistFlow/7", result=SICK, age_s=60)
    assert gate.exclude_nodes(checked, "kubernetes").lines == (f"Excluded by their taint {KEY}: host-2.",)

    publish(judge(gpu_run(8, started_unix=2_000.0)), outputs)
    assert own_taints(server) == []
    with monkeypatch.context() as patched:
        patched.setattr(taint.Cluster, "patch", after_concurrent_change(server))
        (report,) = publish(SICK, outputs)
    assert (report.failed, len(own_taints(server))) == (False, 1), report.lines
    assert node(server)["metadata"]["labels"]["somebody"] == "else"
    publish(judge(gpu_run(8, started_unix=2_000.0)), outputs)
    publish(SICK, Outputs(mark="label", apply=True))
    assert node(server)["metadata"]["labels"][LABEL] == "false"
    assert gate.exclude_nodes(checked, "kubernetes").labels == ((LABEL, "true"),)
    publish(judge(gpu_run(8, started_unix=2_000.0)), Outputs(mark="label", apply=True))
    assert {item.labels.get(LABEL) for item in taint.Cluster().nodes()} == {"true"}
