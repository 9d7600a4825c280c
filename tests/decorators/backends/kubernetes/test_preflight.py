"""The preflight against a real Kubernetes API server: findings, refusals and their messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import pytest

from decorators.backends.findings import Findings
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect, inspect_size
from decorators.backends.options import Options
from decorators.backends.overrides import request_for
from estimator.errors import UserError
from estimator.hardware.cluster.api import Clock
from estimator.hardware.cluster.nodes import INSTANCE_TYPE
from estimator.hardware.cluster.tables import PodResources
from estimator.plan import GIB
from tests.decorators.backends.kubernetes.conftest import INFRA, TWO, Asker, rows_of
from tests.decorators.backends.plans import planned
from tests.decorators.conftest import Home
from tests.lab.control_plane import ControlPlane, jobset_definition, wait_for

pytestmark = pytest.mark.slow


def test_a_suitable_cluster_is_reported_with_the_labels_of_its_nodes(
    run_preflight: Asker, nodes: Callable[..., None]
) -> None:
    gpu_taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    nodes("h100-a", "h100-b", taints=[gpu_taint])
    findings, facts = run_preflight()
    assert findings.impossible == []
    for check in ("namespace", "permission", "jobset", "nodes", "fabric"):
        assert findings.state(check) == "ok", findings.rows
    assert facts.labels == ((INSTANCE_TYPE, "p5.48xlarge"),)
    assert [item.to_dict() for item in facts.tolerations] == [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}
    ]
    assert (facts.efa, facts.zone) == (32, "us-east-1a")
    findings.report_and_check()  # what is unknown stops nobody


@pytest.fixture
def daemons(control_plane: ControlPlane, namespace: str) -> Iterator[None]:
    """A DaemonSet of 3 cores and 6 GiB, run by the real controller."""
    requests = {"cpu": "3", "memory": "6Gi"}
    pod = {
        "containers": [{"name": "agent", "image": "agent", "resources": {"requests": requests}}],
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,  # no kubelet would end it
    }
    body = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "agent", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": "agent"}},
            "template": {"metadata": {"labels": {"app": "agent"}}, "spec": pod},
        },
    }
    path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
    control_plane.api().create(path, body)
    yield
    control_plane.api().delete(f"{path}/agent")


@pytest.mark.usefixtures("daemons")
def test_the_requests_of_daemon_pods_are_read_from_the_cluster(
    run_preflight: Asker, nodes: Callable[..., None], control_plane: ControlPlane
) -> None:
    nodes("h100-a", "h100-b")

    def reported() -> str:
        return str(rows_of(run_preflight()[0], "nodes"))

    assert "2 needed; " in reported()
    wait_for(lambda: "3 CPUs and 6.00 GiB reserved for daemon pods" in reported(), 90, "they run", every=1)
    assert run_preflight()[1].pod_capacity == PodResources(cpu=191.45 - 3, memory_bytes=1944 * GIB)
    # Who may list nodes, but no pods of other namespaces
    control_plane.kubectl("create", "clusterrole", "sees-nodes", "--verb=list", "--resource=nodes")
    control_plane.kubectl("create", "clusterrolebinding", "b", "--clusterrole=sees-nodes", "--user=alice")
    try:
        wait_for(lambda: run_preflight("alice")[0].state("nodes") == "ok", 60, "the role counts", every=1)
        [(_, detail, _)] = rows_of(run_preflight("alice")[0], "nodes")
        assert "0.4 CPUs and 0.40 GiB reserved for daemon pods (assumed: this login may not list" in detail
    finally:
        control_plane.kubectl("delete", "clusterrolebinding/b", "clusterrole/sees-nodes")


def test_a_step_without_gpus_needs_an_untainted_node_with_enough_disk(
    run_preflight: Asker, nodes: Callable[..., None], namespace: str
) -> None:
    """Nodes with GPUs are tainted, and the disk of a small node would keep the step pending forever."""
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    request = request_for(planned("llama-70b", "full", "H100", 2), "data")
    bare = {"nvidia.com/gpu.product": None}
    small = {"nvidia.com/gpu": None, "ephemeral-storage": "20Gi"}
    nodes("h100-a", "h100-b", taints=[taint], provider="")
    nodes("cpu-a", labels=bare, resources=small, provider="")
    assert run_preflight()[0].impossible == []  # the run's largest step has its nodes

    def inspect_prepare() -> Findings:
        return inspect_size(
            "prepare",
            request,
            options=Options(),
            pods=PodSettings(namespace=namespace),
            clock=Clock(overall_s=90),
        )

    refused = inspect_prepare()
    [row] = refused.impossible
    assert row.check == "nodes"
    assert re.search(r"1 with 20\S* .*of disk", row.detail)
    with pytest.raises(UserError, match=r"For step prepare, .* lab cannot run this: nodes") as caught:
        refused.report_and_check()
    assert "--with kubernetes:disk=MB" in caught.value.advice
    nodes("cpu-b", labels=bare, resources={**small, "ephemeral-storage": "4000Gi"}, provider="")
    assert inspect_prepare().impossible == []


def test_too_few_on_premises_nodes_are_refused_with_the_available_number(
    run_preflight: Asker, nodes: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    a100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "node.kubernetes.io/instance-type": None}
    nodes("h100-a", provider="")
    nodes("a100-a", labels=a100, provider="")
    findings, _ = run_preflight()
    [(state, detail, _)] = rows_of(findings, "nodes")
    assert state == "no"
    assert detail.startswith("1 of 2 nodes could run it")
    assert "1 with 8 A100 SXM 80GB" in detail
    with pytest.raises(UserError, match=r"context lab.* cannot run this: nodes: 1 of 2"):
        findings.report_and_check()
    assert "Can Kubernetes context lab" in capsys.readouterr().err


def test_network_devices_without_a_network_definition_are_named(
    run_preflight: Asker, nodes: Callable[..., None]
) -> None:
    rails = {"vpc.amazonaws.com/efa": None, **{f"nvidia.com/resibp{number}": "1" for number in range(2)}}
    nodes("h100-a", "h100-b", provider="", resources=rails)
    findings, facts = run_preflight()
    [(state, detail, _)] = rows_of(findings, "fabric")
    assert (state, dict(facts.devices or ())["nvidia.com/resibp0"]) == ("unknown", 1)
    assert "nvidia.com/resibp0, nvidia.com/resibp1, which no known fabric uses" in detail
    assert "TCP" in detail


STATUS = """autoscalerStatus: Running
nodeGroups:
- name: eks-gpu-0a1b
  health: {status: Healthy, cloudProviderTarget: 1, minSize: 0, maxSize: 4}
"""


def test_nodes_without_nvidias_device_plugin_get_the_command_that_installs_it(
    run_preflight: Asker, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b", resources={"nvidia.com/gpu": "0"}, provider="")
    [(state, _, fix)] = rows_of(run_preflight()[0], "device plugin")
    assert (state, fix[:17]) == ("no", "kubectl apply -f ")


def test_a_login_without_rights_gets_a_list_of_missing_rights(run_preflight: Asker) -> None:
    findings, _ = run_preflight("alice")
    refused = [detail for state, detail, _ in rows_of(findings, "permission") if state == "no"]
    assert any("may not create jobsets" in detail for detail in refused)
    assert any("may not list pods" in detail for detail in refused)
    assert findings.state("nodes") == "unknown"  # it may not list them either
    one = dataclasses.replace(TWO, nodes=1)
    assert any(
        "may not create jobs in" in detail
        for _, detail, _ in rows_of(run_preflight("alice", one)[0], "permission")
    )


def test_the_role_in_infra_is_sufficient(
    run_preflight: Asker, nodes: Callable[..., None], control_plane: ControlPlane
) -> None:
    manifests = control_plane.kubectl("kustomize", str(INFRA))
    control_plane.kubectl("apply", "--validate=false", "-f", "-", stdin=manifests)
    name = next(
        item["metadata"]["namespace"]
        for item in control_plane.api().items("/apis/rbac.authorization.k8s.io/v1/rolebindings")
        if "finetune-launchers" in str(item.get("subjects"))
    )
    nodes("h100-a", "h100-b")

    def ready() -> bool:
        findings, _ = run_preflight("launcher", namespace=name)
        return findings.state("permission") == "ok" and findings.state("nodes") == "ok"

    wait_for(ready, 60, "the role counts", every=1)


def test_a_missing_namespace_and_service_account_are_named(run_preflight: Asker) -> None:
    findings, _ = run_preflight(namespace="nowhere")
    assert rows_of(findings, "namespace")[0][:2] == ("no", "'nowhere' does not exist")
    findings, _ = run_preflight(service_account="nobody")
    [(state, detail, fix)] = rows_of(findings, "service account")
    assert state == "no"
    assert "'nobody' does not exist" in detail
    assert fix.startswith("kubectl create serviceaccount nobody")


def test_a_deployment_is_checked_in_the_namespace_configured_in_metaflow(
    control_plane: ControlPlane, home: Home
) -> None:
    done = home.run(
        "nodes.py",
        *("--datastore=s3", "argo-workflows", "--name", "nodes", "create"),
        KUBECONFIG=str(control_plane.kubeconfig("admin")),
        METAFLOW_KUBERNETES_NAMESPACE="nowhere",
        METAFLOW_KUBERNETES_SERVICE_ACCOUNT="nobody",
        METAFLOW_KUBERNETES_CONTAINER_IMAGE="127.0.0.1:9/finetune:1",
        METAFLOW_DATASTORE_SYSROOT_S3="s3://deployed/root",
        METAFLOW_S3_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",
    )
    assert done.returncode == 1  # of a flow that is Metaflow's alone
    assert "namespace nowhere, run this?" in done.stderr
    for said in ("'nowhere' does not exist", "'nobody' does not exist", "127.0.0.1:9/finetune:1"):
        assert said in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_a_namespace_too_long_for_host_names_is_refused_for_several_nodes_only(
    run_preflight: Asker, control_plane: ControlPlane
) -> None:
    name = control_plane.namespace("of-fifteen-char")
    assert "15 characters" in rows_of(run_preflight(namespace=name)[0], "namespace")[0][1]
    one = dataclasses.replace(TWO, nodes=1)
    assert run_preflight(asks=one, namespace=name)[0].state("namespace") == "ok"


def test_several_nodes_without_jobset_are_refused_with_the_command_that_installs_it(
    run_preflight: Asker, control_plane: ControlPlane
) -> None:
    control_plane.kubectl("delete", "crd", "jobsets.jobset.x-k8s.io", "--timeout=60s")
    try:
        wait_for(lambda: run_preflight()[0].state("jobset") == "no", 60, "JobSet is gone", every=0.5)
        [(_, detail, fix)] = rows_of(run_preflight()[0], "jobset")
        assert "not installed" in detail
        assert fix.startswith("kubectl apply --server-side")
        assert run_preflight(asks=dataclasses.replace(TWO, nodes=1))[0].state("jobset") is None
    finally:
        control_plane.install("jobsets.jobset.x-k8s.io", jobset_definition())


def test_an_unreachable_api_or_a_rejected_login_is_reported_in_one_line(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**replaced: str) -> UserError:
        monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig(**replaced)))
        with pytest.raises(UserError) as caught:
            inspect(TWO, options=Options(), pods=PodSettings())
        return caught.value

    unreachable = refused(server="https://127.0.0.1:9")
    assert "context 'lab' (https://127.0.0.1:9) cannot be reached" in unreachable.problem
    assert "kubectl" in unreachable.advice
    assert "does not accept this login" in refused(token="expired").problem
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(UserError, match="no kubeconfig at /nowhere"):
        inspect(TWO, options=Options(), pods=PodSettings())
