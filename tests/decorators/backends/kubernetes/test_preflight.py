"""The preflight against a real Kubernetes API server: what it finds, what it refuses, and in what words."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, MinimumRequest
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect, inspect_beside
from decorators.backends.kubernetes.request import INSTANCE_TYPE_LABEL
from decorators.backends.options import Options
from decorators.backends.overrides import request_for
from estimator.errors import UserError
from estimator.hardware.cluster_api import Clock
from estimator.hardware.cluster_tables import Room
from estimator.plan import GIB, Request
from tests.decorators.backends.plans import node_object, planned
from tests.decorators.conftest import Home
from tests.lab.control_plane import ControlPlane, jobset_definition, permissive_definition, wait_for

pytestmark = pytest.mark.slow

INFRA = Path(__file__).parents[4] / "infra/kubernetes/base"
TWO = planned("llama-70b", "full", "H100", 2).request  # 2 x p5.48xlarge
LEAST = MinimumRequest(cpu=8, memory_bytes=500 * GIB)
QUEUES = "localqueues.kueue.x-k8s.io,clusterqueues.kueue.x-k8s.io"
Asker = Callable[..., tuple[Findings, ClusterFacts]]


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> str:
    return control_plane.namespace(f"p{abs(hash(request.node.name)) % 10**8}")


@pytest.fixture
def ask(control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Asker:
    """The preflight of one user: ``ask(user=, request=, options=, **step)``."""

    def asked(user: str = "admin", asks: Request = TWO, options: Options | None = None, **step: Any) -> Any:
        monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig(user)))
        return inspect(
            asks,
            options=options or Options(),
            pods=PodSettings(**{"namespace": namespace, "image": "127.0.0.1:9/finetune:1", **step}),
            minimum=LEAST,
            clock=Clock(overall_s=90),  # a machine that is busy with other tests
        )

    return asked


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[Callable[..., None]]:
    """Adds nodes, and takes them away after the test."""
    made: list[str] = []

    def add(*names: str, **more: Any) -> None:
        for name in names:
            body = {"apiVersion": "v1", "kind": "Node", **node_object(name, **more)}
            control_plane.api().create("/api/v1/nodes", body)
            made.append(name)

    yield add
    for name in made:
        control_plane.api().delete(f"/api/v1/nodes/{name}")


def _rows(findings: Findings, check: str) -> list[tuple[str, str, str]]:
    return [(row.state, row.found, row.fix) for row in findings.rows if row.check == check]


def test_a_cluster_that_can_run_it_says_how_its_nodes_are_found(
    ask: Asker, nodes: Callable[..., None]
) -> None:
    gpu_taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    nodes("h100-a", "h100-b", taints=[gpu_taint])
    findings, facts = ask()
    assert findings.impossible == []
    for check in ("namespace", "permission", "jobset", "nodes", "fabric"):
        assert findings.state(check) == "ok", findings.rows
    assert facts.labels == ((INSTANCE_TYPE_LABEL, "p5.48xlarge"),)
    assert [item.to_dict() for item in facts.tolerations] == [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}
    ]
    assert (facts.efa, facts.zone) == (32, "us-east-1a")
    findings.settle()  # what is unknown stops nobody


@pytest.fixture
def daemons(control_plane: ControlPlane, namespace: str) -> Iterator[None]:
    """A DaemonSet of the real controller's, of 3 cores and 6 GiB."""
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
def test_daemon_pods_are_asked_how_much_they_keep(
    ask: Asker, nodes: Callable[..., None], control_plane: ControlPlane
) -> None:
    nodes("h100-a", "h100-b")

    def told() -> str:
        return str(_rows(ask()[0], "nodes"))

    assert "2 needed; " in told()
    wait_for(lambda: "3 CPUs and 6.0 GiB are left to daemon pods" in told(), 90, "they run", every=1)
    assert ask()[1].room == Room(cpu=191.45 - 3, memory_bytes=1944 * GIB)
    # Who may list nodes, but no pods of other namespaces
    control_plane.kubectl("create", "clusterrole", "sees-nodes", "--verb=list", "--resource=nodes")
    control_plane.kubectl("create", "clusterrolebinding", "b", "--clusterrole=sees-nodes", "--user=alice")
    try:
        wait_for(lambda: ask("alice")[0].state("nodes") == "ok", 60, "the role counts", every=1)
        [(_, found, _)] = _rows(ask("alice")[0], "nodes")
        assert "0.4 CPUs and 0.4 GiB are left to daemon pods (assumed: this login may not list" in found
    finally:
        control_plane.kubectl("delete", "clusterrolebinding/b", "clusterrole/sees-nodes")


def test_a_step_that_only_handles_files_needs_a_node_of_its_own_with_their_disk(
    ask: Asker, nodes: Callable[..., None], namespace: str
) -> None:
    """Nodes with GPUs are fenced off to it, and a small node's disk would keep it pending for ever."""
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    request = request_for(planned("llama-70b", "full", "H100", 2), "data")
    bare = {"nvidia.com/gpu.product": None}
    small = {"nvidia.com/gpu": None, "ephemeral-storage": "20Gi"}
    nodes("h100-a", "h100-b", taints=[taint], provider="")
    nodes("cpu-a", labels=bare, resources=small, provider="")
    assert ask()[0].impossible == []  # the run's largest step has its nodes

    def beside() -> Findings:
        return inspect_beside(
            "prepare",
            request,
            options=Options(),
            pods=PodSettings(namespace=namespace),
            clock=Clock(overall_s=90),
        )

    refused = beside()
    [row] = refused.impossible
    assert row.check == "nodes"
    assert "1 with 20 of" in row.found
    assert "GiB of disk" in row.found
    with pytest.raises(UserError, match=r"For step prepare, .* lab can't run this: nodes") as caught:
        refused.settle()
    assert "--with kubernetes:disk=MB" in caught.value.advice
    nodes("cpu-b", labels=bare, resources={**small, "ephemeral-storage": "4000Gi"}, provider="")
    assert beside().impossible == []


def test_too_few_nodes_on_premises_are_refused_with_what_is_there(
    ask: Asker, nodes: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    a100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "node.kubernetes.io/instance-type": None}
    nodes("h100-a", provider="")
    nodes("a100-a", labels=a100, provider="")
    findings, _ = ask()
    [(state, found, _)] = _rows(findings, "nodes")
    assert state == "no"
    assert found.startswith("1 of 2 nodes could take it")
    assert "1 with 8 A100 SXM 80GB" in found
    with pytest.raises(UserError, match=r"context lab.* can't run this: nodes: 1 of 2"):
        findings.settle()
    assert "Can Kubernetes context lab" in capsys.readouterr().err


STATUS = """autoscalerStatus: Running
nodeGroups:
- name: eks-gpu-0a1b
  health: {status: Healthy, cloudProviderTarget: 1, minSize: 0, maxSize: 4}
"""


def test_a_node_group_that_may_grow_is_said_only_where_an_autoscaler_says_so(
    ask: Asker, nodes: Callable[..., None], control_plane: ControlPlane
) -> None:
    nodes("h100-a")
    [(state, found, _)] = _rows(ask()[0], "nodes")
    assert (state, found.rpartition("; ")[2]) == ("no", "no autoscaler is seen here")
    path = "/api/v1/namespaces/kube-system/configmaps"
    status = {"metadata": {"name": "cluster-autoscaler-status"}, "data": {"status": STATUS}}
    control_plane.api().create(path, status)
    try:
        [(state, found, fix)] = _rows(ask()[0], "nodes")
        assert (state, fix) == ("unknown", "eksctl get nodegroup --cluster NAME")
        assert "may add nodes to eks-gpu-0a1b (1 of 4 nodes)" in found
    finally:
        control_plane.api().delete(f"{path}/cluster-autoscaler-status")


def test_gpus_that_are_in_use_are_waited_for(
    ask: Asker, nodes: Callable[..., None], control_plane: ControlPlane, namespace: str
) -> None:
    nodes("h100-a", "h100-b")
    resources = {"limits": {"nvidia.com/gpu": "8"}}
    pod = {
        "metadata": {"name": "holder"},
        "spec": {"nodeName": "h100-b", "containers": [{"name": "c", "image": "c", "resources": resources}]},
    }
    path = f"/api/v1/namespaces/{namespace}/pods"
    control_plane.api().create(path, pod)
    try:
        [(state, found, _)] = _rows(ask()[0], "nodes")
        assert state == "unknown"
        assert found == "2 could take it, 2 needed, 1 with free GPUs: it waits for others to end"
    finally:
        control_plane.api().delete(f"{path}/holder", gracePeriodSeconds=0)


def test_a_taint_in_the_way_is_answered_with_the_toleration_that_opens_it(
    ask: Asker, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b", taints=[{"key": "team", "value": "vision", "effect": "NoSchedule"}])
    [(state, found, fix)] = _rows(ask()[0], "nodes")
    assert state == "no"
    assert "2 fenced off by the taint team=vision:NoSchedule" in found
    wanted = '[{"key":"team","operator":"Equal","effect":"NoSchedule","value":"vision"}]'
    assert fix == f"--with 'kubernetes:tolerations={wanted}'"


def test_nodes_without_nvidias_device_plugin_get_the_command_that_installs_it(
    ask: Asker, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b", resources={"nvidia.com/gpu": "0"}, provider="")
    [(state, _, fix)] = _rows(ask()[0], "device plugin")
    assert (state, fix[:17]) == ("no", "kubectl apply -f ")


def test_a_login_without_rights_is_told_which_it_lacks(ask: Asker) -> None:
    findings, _ = ask("alice")
    refused = [found for state, found, _ in _rows(findings, "permission") if state == "no"]
    assert any("may not create jobsets" in found for found in refused)
    assert any("may not list pods" in found for found in refused)
    assert findings.state("nodes") == "unknown"  # it may not list them either
    one = dataclasses.replace(TWO, nodes=1)
    assert any("may not create jobs in" in found for _, found, _ in _rows(ask("alice", one)[0], "permission"))


def test_the_role_of_infra_is_enough(
    ask: Asker, nodes: Callable[..., None], control_plane: ControlPlane
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
        findings, _ = ask("launcher", namespace=name)
        return findings.state("permission") == "ok" and findings.state("nodes") == "ok"

    wait_for(ready, 60, "the role counts", every=1)


def test_a_namespace_and_a_service_account_that_there_are_not(ask: Asker) -> None:
    findings, _ = ask(namespace="nowhere")
    assert _rows(findings, "namespace")[0][:2] == ("no", "there is no 'nowhere'")
    findings, _ = ask(service_account="nobody")
    [(state, found, fix)] = _rows(findings, "service account")
    assert state == "no"
    assert "there is no 'nobody'" in found
    assert fix.startswith("kubectl create serviceaccount nobody")


def test_a_deployment_is_checked_where_metaflow_is_configured_to_run_it(
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
    for said in ("there is no 'nowhere'", "there is no 'nobody'", "127.0.0.1:9/finetune:1"):
        assert said in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_a_namespace_too_long_for_host_names_is_refused_for_several_nodes_only(
    ask: Asker, control_plane: ControlPlane
) -> None:
    name = control_plane.namespace("of-fifteen-char")
    assert "15 characters" in _rows(ask(namespace=name)[0], "namespace")[0][1]
    one = dataclasses.replace(TWO, nodes=1)
    assert ask(asks=one, namespace=name)[0].state("namespace") == "ok"


def test_a_quota_that_is_too_small_is_refused(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    control_plane.kubectl("create", "quota", "few", "--hard=requests.nvidia.com/gpu=8", "-n", namespace)
    [(state, found, fix)] = _rows(ask()[0], "quota")
    assert state == "no"
    assert found == "few allows 8 requests.nvidia.com/gpu; 16 are needed"
    assert fix == f"kubectl describe resourcequota few -n {namespace}"


def test_a_quota_with_scopes_is_refused_only_where_it_counts_the_pods(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    for name, scope in (("services", "NotTerminating"), ("jobs", "Terminating")):
        hard = "--hard=requests.nvidia.com/gpu=8"
        control_plane.kubectl("create", "quota", name, hard, f"--scopes={scope}", "-n", namespace)
    rows = [(state, found) for state, found, _ in _rows(ask()[0], "quota")]
    assert rows == [("no", "jobs allows 8 requests.nvidia.com/gpu; 16 are needed")]
    endless = Options(pod_template={"spec": {"activeDeadlineSeconds": None}})
    rows = [(state, found) for state, found, _ in _rows(ask(options=endless)[0], "quota")]
    assert rows == [("no", "services allows 8 requests.nvidia.com/gpu; 16 are needed")]


def test_a_priority_class_must_be_there_and_has_quotas_of_its_own(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    control_plane.kubectl("create", "priorityclass", "research", "--value=7")
    try:
        asked = Options(priority_class="resaerch")
        [(state, found, fix)] = _rows(ask(options=asked)[0], "priority class")
        assert (state, fix.partition(" ")[0]) == ("no", "Name")
        assert found.startswith("there is no 'resaerch'; the cluster has ")
        assert "research" in found
        control_plane.apply(_quota_of_class("research", namespace))
        rows = _rows(ask(options=Options(priority_class="research"))[0], "priority class")
        assert rows == [("ok", "research", "")]
        [(state, found, _)] = _rows(ask(options=Options(priority_class="research"))[0], "quota")
        assert (state, found) == ("no", "by-class allows 8 requests.nvidia.com/gpu; 16 are needed")
        other = ask()[0]
        assert _rows(other, "quota") == _rows(other, "priority class") == []
        in_patch = Options(pod_template={"spec": {"priorityClassName": "nowhere"}})
        assert ask(options=in_patch)[0].state("priority class") == "no"
    finally:
        control_plane.kubectl("delete", "priorityclass", "research")


def _quota_of_class(name: str, namespace: str) -> dict[str, Any]:
    demand = {"scopeName": "PriorityClass", "operator": "In", "values": [name]}
    hard = {"requests.nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "by-class", "namespace": namespace},
        "spec": {"hard": hard, "scopeSelector": {"matchExpressions": [demand]}},
    }


def test_quotas_of_disk_objects_limits_and_other_resources_are_refused_too(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    hard = {
        "requests.ephemeral-storage": "900Gi",
        "requests.vpc.amazonaws.com/efa": "32",
        "count/jobs.batch": "1",
        "count/jobsets.jobset.x-k8s.io": "1",
        "limits.memory": "100Gi",
    }
    listed = ",".join(f"{name}={value}" for name, value in hard.items())
    control_plane.kubectl("create", "quota", "few", f"--hard={listed}", "-n", namespace)
    refused = {found: fix for state, found, fix in _rows(ask()[0], "quota") if state == "no"}
    disk = round(2 * TWO.disk_mib / 1024)
    assert f"few allows 900Gi requests.ephemeral-storage; {disk}Gi are needed" in refused
    assert "few allows 32 requests.vpc.amazonaws.com/efa; 64 are needed" in refused
    assert "few allows 1 count/jobs.batch; 2 are needed" in refused
    without = "few has limits.memory, so it refuses pods without such a limit"
    assert refused[without].startswith("--with kubernetes:qos=Guaranteed")
    assert len(refused) == 4
    guaranteed = str(_rows(ask(guaranteed=True)[0], "quota"))
    assert "few allows 100Gi limits.memory; " in guaranteed
    assert without not in guaranteed


def test_the_rules_of_a_namespace_that_would_refuse_the_pods_or_cut_them_off(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    checks = ("limit range", "pod security", "network policy")
    assert [_rows(ask()[0], check) for check in checks] == [[], [], []]
    limits = {"type": "Container", "max": {"cpu": "64"}, "default": {"memory": "8Gi"}, "min": {"cpu": "2"}}
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "small", "namespace": namespace},
            "spec": {"limits": [{**limits, "defaultRequest": {"cpu": "2", "memory": "1Gi"}}]},
        },
        _network_policy(namespace, "deny", {}),
    )
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    findings = ask()[0]
    limited = {found: fix for state, found, fix in _rows(findings, "limit range") if state == "no"}
    assert f"small allows a container 64 cpu; {TWO.cpu} cpu are needed" in limited
    (memory,) = [found for found in limited if "memory" in found]
    assert memory.startswith("small gives containers a limit of 8Gi memory, below the ")
    assert limited[memory].startswith("--with kubernetes:qos=Guaranteed")
    [(state, _, fix)] = _rows(findings, "pod security")
    assert (state, "seccomp_profile" in fix) == ("no", True)
    [(state, _, fix)] = _rows(findings, "network policy")
    assert (state, fix) == ("unknown", "kubectl apply -k infra/kubernetes/components/network-policy")
    # with what the fixes say
    control_plane.apply(_network_policy(namespace, "open", {"ingress": [{"from": [{"podSelector": {}}]}]}))
    mended = ask(guaranteed=True, restricted=True)[0]
    assert _rows(mended, "pod security") == _rows(mended, "network policy") == []
    assert "memory" not in str(_rows(mended, "limit range"))
    one = ask(asks=dataclasses.replace(TWO, nodes=1))[0]
    assert _rows(one, "network policy") == []


def _network_policy(namespace: str, name: str, rules: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], **rules},
    }


@pytest.mark.parametrize("resource", ["cpu", "requests.cpu"])
def test_a_quota_goes_by_either_name_of_a_resource(
    ask: Asker, control_plane: ControlPlane, namespace: str, resource: str
) -> None:
    control_plane.kubectl("create", "quota", "few", f"--hard={resource}=8", "-n", namespace)
    [(state, found, _)] = _rows(ask()[0], "quota")
    assert (state, found) == ("no", f"few allows 8 {resource}; {TWO.nodes * TWO.cpu} are needed")


def test_several_nodes_without_jobset_are_refused_with_the_command_that_installs_it(
    ask: Asker, control_plane: ControlPlane
) -> None:
    control_plane.kubectl("delete", "crd", "jobsets.jobset.x-k8s.io", "--timeout=60s")
    try:
        wait_for(lambda: ask()[0].state("jobset") == "no", 60, "JobSet is gone", every=0.5)
        [(_, found, fix)] = _rows(ask()[0], "jobset")
        assert "not installed" in found
        assert fix.startswith("kubectl apply --server-side")
        assert ask(asks=dataclasses.replace(TWO, nodes=1))[0].state("jobset") is None
    finally:
        control_plane.install("jobsets.jobset.x-k8s.io", jobset_definition())


def test_a_queue_is_looked_for_in_kueue(
    ask: Asker, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    options = Options(queue="gpus")
    [(state, found, fix)] = _rows(ask(options=options)[0], "queue")
    assert (state, found) == ("no", "'gpus' is a queue of Kueue, which is not installed")
    assert "/kueue/releases/download/v" in fix
    assert "infra/kubernetes/README.md" in fix
    definition = permissive_definition(
        "localqueues", "kueue.x-k8s.io", "v1beta1", "LocalQueue", "Namespaced", tmp_path / "crd"
    )
    control_plane.install("localqueues.kueue.x-k8s.io", definition)
    try:
        queue = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue"}
        path = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues"
        control_plane.api().create(
            path, {**queue, "metadata": {"name": "research"}, "spec": {"clusterQueue": "all"}}
        )
        wait_for(lambda: "no LocalQueue" in str(_rows(ask(options=options)[0], "queue")), 30, "Kueue is seen")
        assert _rows(ask(options=options)[0], "queue")[0][2] == "--queue research"
        asked = Options(queue="research")
        first, second = _rows(ask(options=asked)[0], "queue")
        assert first[:2] == ("ok", "research, of cluster queue all")
        assert second[:2] == ("unknown", "there is no ClusterQueue 'all': nothing is admitted")
        definition = permissive_definition(
            "clusterqueues", "kueue.x-k8s.io", "v1beta1", "ClusterQueue", "Cluster", tmp_path / "cluster"
        )
        control_plane.install("clusterqueues.kueue.x-k8s.io", definition)
        control_plane.apply(_cluster_queue("0"))
        wait_for(lambda: ask(options=asked)[0].state("queue") == "no", 30, "the ClusterQueue is seen")
        refused = [found for state, found, _ in _rows(ask(options=asked)[0], "queue") if state == "no"]
        assert refused == [
            "ClusterQueue all has no quota of ephemeral-storage, memory, vpc.amazonaws.com/efa",
            "ClusterQueue all: flavor h100 has 0 of 16 nvidia.com/gpu: it never admits this",
        ]

        def short(*queues: dict[str, Any]) -> list[str]:
            """What is refused beside the resources without a quota, which it never admits."""
            control_plane.apply(*queues)
            found = [found for state, found, _ in _rows(ask(options=asked)[0], "queue") if state == "no"]
            assert found[:1] == refused[:1]
            return found[1:]

        mine = _cluster_queue("0", cohort="everybody")
        others = _cluster_queue("16", name="others", cohort="everybody")
        lends = ", with what cohort everybody lends: it never admits this"
        assert short(mine) == [f"ClusterQueue all: flavor h100 has 0 of 16 nvidia.com/gpu{lends}"]
        assert short(mine, others) == []
        gpus = others["spec"]["resourceGroups"][0]["flavors"][0]["resources"][1]
        gpus["lendingLimit"] = "8"
        assert short(others) == [f"ClusterQueue all: flavor h100 has 8 of 16 nvidia.com/gpu{lends}"]
        gpus["lendingLimit"] = None
        mine["spec"]["resourceGroups"][0]["flavors"][0]["resources"][1]["borrowingLimit"] = "4"
        assert short(mine, others) == [f"ClusterQueue all: flavor h100 has 4 of 16 nvidia.com/gpu{lends}"]
        # Who may not list them is not told what they lend
        control_plane.kubectl("create", "clusterrole", "sees-queues", "--verb=get", f"--resource={QUEUES}")
        control_plane.kubectl(
            "create", "clusterrolebinding", "q", "--clusterrole=sees-queues", "--user=alice"
        )
        control_plane.apply(_cluster_queue("0", cohort="everybody"))
        told = "ClusterQueue all has no quota of"
        wait_for(lambda: told in str(_rows(ask("alice", options=asked)[0], "queue")), 30, "the role counts")
        assert "cohort" not in str(_rows(ask("alice", options=asked)[0], "queue"))
        assert short(_cluster_queue("12", name="others", cohort="another"), _cluster_queue("4")) == [
            "ClusterQueue all: flavor h100 has 4 of 16 nvidia.com/gpu: it never admits this"
        ]
    finally:
        names = ("clusterrolebinding/q", "clusterrole/sees-queues")
        control_plane.kubectl("delete", *names, "--ignore-not-found")
        for name in ("localqueues", "clusterqueues"):
            control_plane.kubectl("delete", "crd", f"{name}.kueue.x-k8s.io", "--ignore-not-found")


def test_a_queue_whose_flavors_all_have_a_topology_says_by_what_nodes_are_kept_together(
    ask: Asker, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    group, version = "kueue.x-k8s.io", "v1beta1"
    kinds = {
        "localqueues": ("LocalQueue", "Namespaced"),
        "clusterqueues": ("ClusterQueue", "Cluster"),
        "resourceflavors": ("ResourceFlavor", "Cluster"),
        "topologies": ("Topology", "Cluster"),
    }

    def thing(kind: str, name: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name}, "spec": spec}

    def near(nodes: int = 2) -> str | None:
        return ask(asks=dataclasses.replace(TWO, nodes=nodes), options=Options(queue="q"))[1].near

    try:
        for plural, (kind, scope) in kinds.items():
            crd = permissive_definition(plural, group, version, kind, scope, tmp_path / plural)
            control_plane.install(f"{plural}.{group}", crd)
        queue = thing("LocalQueue", "q", clusterQueue="all")
        control_plane.apply({**queue, "metadata": {"name": "q", "namespace": namespace}})
        labels = ["cloud/block", "cloud/rack", "kubernetes.io/hostname"]
        levels = [{"nodeLabel": label} for label in labels]
        control_plane.apply(thing("Topology", "tree", levels=levels))
        control_plane.apply(thing("ResourceFlavor", "h100", topologyName="tree"), _cluster_queue("16"))
        wait_for(lambda: near() == "cloud/rack", 30, "the topology is seen")
        assert near(nodes=1) is None
        mixed = _cluster_queue("16")
        flavors = mixed["spec"]["resourceGroups"][0]["flavors"]
        flavors.append({**flavors[0], "name": "spot"})
        control_plane.apply(thing("ResourceFlavor", "spot"), mixed)
        assert near() is None
    finally:
        for plural in kinds:
            control_plane.kubectl("delete", "crd", f"{plural}.{group}", "--ignore-not-found")


def _cluster_queue(gpus: str, name: str = "all", **spec: Any) -> dict[str, Any]:
    covered = {"cpu": "1k", "nvidia.com/gpu": gpus}
    quotas = [{"name": what, "nominalQuota": amount} for what, amount in covered.items()]
    group = {"coveredResources": list(covered), "flavors": [{"name": "h100", "resources": quotas}]}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {"resourceGroups": [group], **spec},
    }


def test_a_node_pool_of_karpenters_may_add_the_nodes(
    ask: Asker, control_plane: ControlPlane, tmp_path: Path
) -> None:
    definition = permissive_definition(
        "nodepools", "karpenter.sh", "v1", "NodePool", "Cluster", tmp_path / "crd"
    )
    control_plane.install("nodepools.karpenter.sh", definition)
    try:
        rule = {"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["p5"]}
        pool = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": "gpus"},
            "spec": {"template": {"spec": {"requirements": [rule]}}},
        }
        control_plane.api().create("/apis/karpenter.sh/v1/nodepools", pool)
        wait_for(lambda: "NodePool gpus may add" in str(_rows(ask()[0], "nodes")), 30, "Karpenter is seen")
        # One whose nodes will have a taint of their own, and one that may not start so many
        taint = {"key": "team", "value": "vision", "effect": "NoSchedule"}
        path = "/apis/karpenter.sh/v1/nodepools/gpus"
        control_plane.api().patch(path, {"spec": {"template": {"spec": {"taints": [taint]}}}})
        [(state, found, fix)] = _rows(ask()[0], "nodes")
        assert (state, "the taint team=vision:NoSchedule, which the pods don't tolerate" in found) == (
            "no",
            True,
        )
        assert fix.startswith('--with \'kubernetes:tolerations=[{"key":"team"')
        control_plane.api().patch(
            path, {"spec": {"template": {"spec": {"taints": None}}, "limits": {"nvidia.com/gpu": 8}}}
        )
        [(state, found, fix)] = _rows(ask()[0], "nodes")
        assert (state, "leave room for 1 of 2 p5.48xlarge" in found) == ("no", True)
        assert "tolerations" not in fix
    finally:
        control_plane.kubectl("delete", "crd", "nodepools.karpenter.sh")


def test_an_api_that_is_not_there_or_knows_nobody_is_one_line_in_time(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**replaced: str) -> UserError:
        monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig(**replaced)))
        began = time.monotonic()
        with pytest.raises(UserError) as caught:
            inspect(TWO, options=Options(), pods=PodSettings())
        assert time.monotonic() - began < 30
        return caught.value

    gone = refused(server="https://127.0.0.1:9")
    assert "context 'lab' (https://127.0.0.1:9) can't be reached" in gone.problem
    assert "kubectl config current-context" in gone.advice
    assert "doesn't know who asks" in refused(token="expired").problem
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(UserError, match="no kubeconfig at /nowhere"):
        inspect(TWO, options=Options(), pods=PodSettings())
