"""``--from-cluster``: what nodes of EKS, Karpenter, GKE and bare metal say of themselves becomes machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster import api as cluster_api
from estimator.hardware.cluster.inventory import read_cluster
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import GIB, MIB
from tests.http_server import serving


@pytest.fixture(autouse=True)
def _isolated_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FINETUNE_HARDWARE", "KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    hardware.clear_cache()


def node(
    name: str,
    labels: dict[str, str],
    resources: dict[str, str],
    *,
    provider: str = "",
    ready: str = "True",
    cordoned: bool = False,
    taints: tuple[tuple[str, str, str], ...] = (),
) -> dict[str, Any]:
    """A node as the API server writes it; ``resources`` can be allocated, and a little more is there."""
    spec: dict[str, Any] = {"podCIDR": "10.1.2.0/24"}
    if provider:
        spec["providerID"] = provider
    if cordoned:
        spec["unschedulable"] = True
    if taints or cordoned:
        spec["taints"] = [{"key": key, "value": value, "effect": effect} for key, value, effect in taints]
    if cordoned:
        spec["taints"].append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels},
        "spec": spec,
        "status": {
            "allocatable": {"pods": "58", "hugepages-2Mi": "0"} | resources,
            "capacity": {"pods": "58"} | resources | {"cpu": str(-(-int(resources["cpu"][:-1]) // 1000))},
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": ready, "reason": "KubeletReady"},
            ],
            "nodeInfo": {"kubeletVersion": "v1.33.4-eks-99d6cc0"},
        },
    }


def eks_p5(number: int, **changes: Any) -> dict[str, Any]:
    """EKS with GPU feature discovery, as its labels are on an 8x H100."""
    labels = {
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "topology.kubernetes.io/region": "us-east-1",
        "topology.kubernetes.io/zone": f"us-east-1{'ab'[number % 2]}",
        "eks.amazonaws.com/capacityType": "ON_DEMAND",
        "eks.amazonaws.com/nodegroup": "gpu",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
    }
    resources = {
        "cpu": "191450m",
        "memory": f"{2086000000 + number}Ki",
        "ephemeral-storage": "3295551679124",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "32",
    }
    return node(
        f"ip-10-0-0-{number}.ec2.internal",
        labels | changes.pop("labels", {}),
        resources | changes.pop("resources", {}),
        provider=f"aws:///us-east-1a/i-0{number}",
        **changes,
    )


def karpenter_a100(number: int, mib: str = "40960") -> dict[str, Any]:
    """A node that Karpenter has started, without GPU feature discovery."""
    labels = {
        "node.kubernetes.io/instance-type": "p4d.24xlarge",
        "topology.kubernetes.io/zone": "us-west-2b",
        "karpenter.sh/capacity-type": "spot",
        "karpenter.sh/nodepool": "gpu",
        "karpenter.k8s.aws/instance-gpu-name": "a100",
        "karpenter.k8s.aws/instance-gpu-count": "8",
        "karpenter.k8s.aws/instance-gpu-memory": mib,
    }
    resources = {"cpu": "95690m", "memory": "1150000Mi", "ephemeral-storage": "1800Gi", "nvidia.com/gpu": "8"}
    return node(
        f"karpenter-{number}",
        labels,
        resources,
        provider=f"aws:///us-west-2b/i-1{number}",
        taints=(("nvidia.com/gpu", "true", "NoSchedule"),),
    )


def gke_l4(number: int, **labels: str) -> dict[str, Any]:
    own = {
        "node.kubernetes.io/instance-type": "g2-standard-8",
        "topology.kubernetes.io/region": "us-central1",
        "topology.kubernetes.io/zone": "us-central1-a",
        "cloud.google.com/gke-accelerator": "nvidia-l4",
        "cloud.google.com/gke-accelerator-count": "1",
        "cloud.google.com/gke-nodepool": "l4",
    }
    resources = {"cpu": "7910m", "memory": "28460Mi", "nvidia.com/gpu": "1"}
    return node(
        f"gke-l4-{number}", own | labels, resources, provider=f"gce://project/us-central1-a/l4-{number}"
    )


def bare_metal(name: str, labels: dict[str, str], gpus: str = "4") -> dict[str, Any]:
    return node(name, labels, {"cpu": "63000m", "memory": "500Gi", "nvidia.com/gpu": gpus})


CPU_NODE = node("cpu-1", {"node.kubernetes.io/instance-type": "m5.large"}, {"cpu": "1930m", "memory": "7Gi"})


@dataclass
class Api:
    """An API server that has nodes and nothing else."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=list)
    quotas: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    body: bytes | None = None
    delay_s: float = 0
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> dict[str, Any] | None:
        """None: there is nothing there."""
        if urlsplit(path).path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
            return {"status": {"allowed": True}}
        if urlsplit(path).path.endswith("/pods"):
            return {"kind": "PodList", "metadata": {}, "items": self.pods}
        if urlsplit(path).path.endswith("/resourcequotas"):
            return {"kind": "ResourceQuotaList", "items": self.quotas}
        if urlsplit(path).path != "/api/v1/nodes":
            return None
        asked = {key: values[0] for key, values in parse_qs(urlsplit(path).query).items()}
        start, limit = int(asked.get("continue", 0)), int(asked["limit"])
        metadata: dict[str, str] = {"resourceVersion": "1"}
        if start + limit < len(self.nodes):
            metadata["continue"] = str(start + limit)
        items = self.nodes[start : start + limit]
        return {"kind": "NodeList", "apiVersion": "v1", "metadata": metadata, "items": items}


@contextmanager
def serving_api(api: Api) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api.requests.append(self.path)
            time.sleep(api.delay_s)
            answer = api.answer(self.path) if api.body is None else {}
            body = api.body if api.body is not None else json.dumps(answer or {}).encode()
            self.send_response(404 if answer is None else api.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with serving(Handler) as url:
        yield url


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """The server of the context "training", which is the current one; "away" leads nowhere."""
    served = Api()
    with serving_api(served) as url:
        write_kubeconfig(tmp_path, training=url, away="http://127.0.0.1:9")
        yield served


def write_kubeconfig(home: Path, current: str = "training", **servers: str) -> None:
    file = home / ".kube" / "config"
    file.parent.mkdir(exist_ok=True)
    contexts = [{"name": name, "context": {"cluster": name, "user": "u"}} for name in servers]
    clusters = [{"name": name, "cluster": {"server": url}} for name, url in servers.items()]
    users = [{"name": "u", "user": {"token": "t"}}]
    config = {"contexts": contexts, "clusters": clusters, "users": users, "current-context": current}
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))


def reasons(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    return {aside.reason: aside.names for aside in cluster.skipped}


def test_equal_eks_nodes_form_one_group_with_their_allocatable_resources(api: Api) -> None:
    api.nodes = [eks_p5(1), CPU_NODE, eks_p5(2)]
    cluster = read_cluster()
    assert (cluster.context, cluster.nodes_without_gpu, cluster.skipped) == ("training", 1, ())
    (group,) = cluster.nodes
    assert (group.count, group.instance.name, group.instance.gpu_count) == (2, "p5.48xlarge", 8)
    assert (group.gpu.name, group.gpu.vram_bytes) == ("H100 SXM", 81559 * MIB)
    assert (group.cpu, group.memory_bytes) == (191.45, 2086000001 * 1024)
    assert (group.ephemeral_bytes, group.efa, group.spot) == (3295551679124, 32, False)
    assert group.zones == ("us-east-1a", "us-east-1b")
    assert group.instance.usd_per_hour == 55.04
    assert group.names == ("ip-10-0-0-1.ec2.internal", "ip-10-0-0-2.ec2.internal")


def test_karpenter_labels_distinguish_a100_40_gb_and_80_gb(api: Api) -> None:
    api.nodes = [karpenter_a100(1), karpenter_a100(2, mib="81920")]
    small, large = read_cluster().nodes
    assert (small.gpu.name, large.gpu.name) == ("A100 SXM 40GB", "A100 SXM 80GB")
    assert small.spot is True
    assert small.taints == ("nvidia.com/gpu=true:NoSchedule",)
    assert small.instance.usd_per_hour == 21.957642
    assert large.instance.usd_per_hour is None  # a p4d.24xlarge of the table has other GPUs
    assert large.instance.cloud == "aws"


def test_gke_labels_name_the_gpu_and_resources_are_the_allocatable_ones(api: Api) -> None:
    api.nodes = [gke_l4(1), gke_l4(2, **{"cloud.google.com/gke-spot": "true"})]
    bought, spot = read_cluster().nodes
    assert (bought.instance.cloud, bought.instance.name, bought.gpu.name) == ("gcp", "g2-standard-8", "L4")
    assert (bought.gpu.vram_bytes, bought.memory_bytes) == (23034 * MIB, 28460 * MIB)
    assert (bought.spot, spot.spot) == (None, True)


def test_an_on_premises_node_is_named_by_its_gpus(api: Api) -> None:
    api.nodes = [
        bare_metal(
            "box", {"nvidia.com/gpu.product": "NVIDIA-GeForce-RTX-4090", "nvidia.com/gpu.memory": "24564"}
        )
    ]
    (group,) = read_cluster().nodes
    assert (group.instance.name, group.instance.cloud) == ("4x RTX 4090", "cluster")
    assert (group.instance.vcpu, group.instance.ram_bytes) == (63, 500 * GIB)
    assert group.gpu.vram_bytes == 24564 * MIB  # the driver's, as the table has the label only
    assert group.instance.usd_per_hour is None


def test_a_node_without_gpu_labels_is_identified_by_its_machine_type(api: Api) -> None:
    bare = node(
        "plain",
        {"node.kubernetes.io/instance-type": "g5.12xlarge"},
        {"cpu": "47810m", "memory": "180Gi", "nvidia.com/gpu": "4"},
    )
    odd = bare_metal("odd", {})
    api.nodes = [bare, odd]
    cluster = read_cluster()
    assert [group.gpu.name for group in cluster.nodes] == ["A10G"]
    assert reasons(cluster) == {
        "unknown GPU: no label names it (nvidia.com/gpu.product is missing); "
        "add the machine type (--hardware FILE), or set it with --gpu NAME": ("odd",)
    }
    named = read_cluster(gpu="H100-80GB").nodes
    assert {(group.gpu.name, group.gpu_assumed) for group in named} == {
        ("A10G", False),
        ("H100 PCIe", True),  # the slower of those that the name stands for
    }


def test_unschedulable_nodes_are_skipped_with_the_reason(api: Api) -> None:
    api.nodes = [eks_p5(1), eks_p5(2, ready="False"), eks_p5(3, ready="Unknown"), eks_p5(4, cordoned=True)]
    cluster = read_cluster()
    assert [group.count for group in cluster.nodes] == [1]
    assert reasons(cluster) == {
        "not Ready": ("ip-10-0-0-2.ec2.internal", "ip-10-0-0-3.ec2.internal"),
        "unschedulable (cordoned)": ("ip-10-0-0-4.ec2.internal",),
    }


@pytest.mark.parametrize(
    ("labels", "resources", "says"),
    [
        (
            {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED", "nvidia.com/gpu.replicas": "4"},
            {"nvidia.com/gpu": "32"},
            "GPUs are shared (time-slicing",
        ),
        ({"nvidia.com/gpu.sharing-strategy": "mps"}, {}, "GPUs are shared (mps"),
        ({"cloud.google.com/gke-max-shared-clients-per-gpu": "2"}, {"nvidia.com/gpu": "16"}, "are shared"),
        ({}, {"nvidia.com/gpu": "0", "nvidia.com/mig-odd": "2"}, "no nvidia.com/gpu is allocatable"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-MIG-odd"}, {}, "unknown GPU with MIG slices odd"),
        ({}, {"nvidia.com/gpu": "0"}, "no nvidia.com/gpu is allocatable: check NVIDIA's device plugin"),
        ({}, {"nvidia.com/gpu": "0", "amd.com/gpu": "8"}, "not an NVIDIA GPU: amd.com/gpu"),
        ({"nvidia.com/gpu.product": "NVIDIA-H900"}, {}, "unknown GPU: nvidia.com/gpu.product=NVIDIA-H900"),
    ],
)
def test_partial_and_unknown_gpus_are_reported_and_never_guessed(
    api: Api, labels: dict[str, str], resources: dict[str, str], says: str
) -> None:
    api.nodes = [eks_p5(1, labels=labels, resources=resources)]
    cluster = read_cluster()
    assert cluster.nodes == ()
    (aside,) = cluster.skipped
    assert says in aside.reason
    assert aside.names == ("ip-10-0-0-1.ec2.internal",)


def test_a_karpenter_gpu_name_with_a_contradictory_size_is_unknown(api: Api) -> None:
    api.nodes = [karpenter_a100(1, mib="163840")]
    (aside,) = read_cluster().skipped
    assert "karpenter.k8s.aws/instance-gpu-name=a100 of 163840 MiB" in aside.reason


@pytest.mark.parametrize(
    ("labels", "resources", "name"),
    [
        (
            {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb+me"},
            {"nvidia.com/gpu": "56"},
            "H100 SXM MIG 1g.10gb.me",
        ),
        ({}, {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "16"}, "H100 SXM MIG 3g.40gb"),
        ({"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}, {}, "H100 SXM MIG 1g.5gb"),
    ],
)
def test_a_mig_slice_is_a_gpu_of_its_own_size(
    api: Api, labels: dict[str, str], resources: dict[str, str], name: str
) -> None:
    api.nodes = [eks_p5(1, labels=labels, resources=resources)]
    (group,) = read_cluster().nodes
    size = int(name.partition("g.")[2].partition("gb")[0])
    assert (group.gpu.name, group.gpu.vram_bytes) == (name, size * 10**9)
    assert (group.instance.gpu_count, group.instance.usd_per_hour) == (1, None)
    assert hardware.gpu(name) == group.gpu, "every process derives the same from the name"


def test_a_replica_of_a_shared_gpu_is_used_only_if_it_is_named(api: Api) -> None:
    shared = {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}
    api.nodes = [eks_p5(1, labels=shared, resources={"nvidia.com/gpu": "32"})]
    (aside,) = read_cluster().skipped
    assert "--gpu 'H100 SXM shared by 4'" in aside.reason
    (group,) = read_cluster(gpu="H100 SXM shared by 4").nodes
    assert group.instance.gpu_count == 1
    assert group.gpu.vram_bytes == hardware.gpu("H100").usable_bytes // 4


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("GPU-a,10,81559,100,NVIDIA H100,0,true:GPU-b,10,81000,100,NVIDIA H100,0,true:", None),
        ('[{"id": "GPU-a", "devmem": 81000}, {"id": "GPU-b", "devmem": 81559}]', None),
        ('[{"id": "GPU-a"}]', "GPUs are shared by HAMi, whose annotation is unreadable"),
        ("nothing", "GPUs are shared by HAMi, whose annotation is unreadable"),
    ],
)
def test_hami_names_its_physical_gpus(api: Api, annotation: str, reason: str | None) -> None:
    made = eks_p5(1, resources={"nvidia.com/gpu": "20"})
    made["metadata"]["annotations"] = {"hami.io/node-nvidia-register": annotation}
    api.nodes = [made]
    cluster = read_cluster()
    assert [aside.reason for aside in cluster.skipped] == ([reason] if reason else [])
    found = [(group.instance.gpu_count, group.gpu.vram_bytes) for group in cluster.nodes]
    assert found == ([] if reason else [(2, 81000 * MIB)])


@pytest.mark.parametrize("key", ["karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"])
def test_a_node_with_a_temporary_taint_is_never_used(api: Api, key: str) -> None:
    """Not even where the user tolerates every taint."""
    api.nodes = [
        eks_p5(1, taints=((key, "", "NoSchedule"),)),
        eks_p5(2, taints=((key, "", "PreferNoSchedule"),)),
    ]
    rules = PodRules(tolerations=(Toleration(key="", effect=""),))
    cluster = read_cluster(rules=rules)
    assert reasons(cluster) == {f"being removed ({key})": ("ip-10-0-0-1.ec2.internal",)}
    assert [group.count for group in cluster.nodes] == [1]


def test_complete_gpus_next_to_mig_slices_are_usable(api: Api) -> None:
    api.nodes = [eks_p5(1, resources={"nvidia.com/gpu": "6", "nvidia.com/mig-3g.40gb": "4"})]
    (group,) = read_cluster().nodes
    assert group.instance.gpu_count == 6


def test_a_gpu_of_a_user_table_is_recognized(api: Api, tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("gpu,vendor,vram_GB,aliases\nH900,nvidia,900,NVIDIA H900\n")
    api.nodes = [
        eks_p5(1, labels={"nvidia.com/gpu.product": "NVIDIA-H900", "nvidia.com/gpu.memory": "920000"})
    ]
    (group,) = read_cluster(catalogue=hardware.catalogue(own)).nodes
    assert (group.gpu.name, group.gpu.vram_bytes) == ("H900", 920000 * MIB)


def test_cluster_nodes_become_the_catalogue_for_planning(api: Api) -> None:
    api.nodes = [eks_p5(1), gke_l4(1), eks_p5(2, resources={"nvidia.com/gpu": "6"})]
    cluster = read_cluster()
    assert len(cluster.nodes) == 3
    with hardware.using(cluster.catalogue()):
        assert {item.name: item.gpu_count for item in hardware.instances()} == {
            "g2-standard-8": 1,
            "p5.48xlarge": 8,
        }
        assert (hardware.gpu("H100").vram_bytes, hardware.gpu("T4").vram_bytes) == (81559 * MIB, 15360 * MIB)


def test_a_large_cluster_is_read_page_by_page(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "PAGE", 2)
    api.nodes = [eks_p5(number) for number in range(5)]
    assert [group.count for group in read_cluster().nodes] == [5]
    assert len([path for path in api.requests if path.startswith("/api/v1/nodes")]) == 3


def refused(context: str | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        read_cluster(context)
    assert "\n" not in caught.value.problem
    return caught.value


def test_a_missing_kubeconfig_is_a_one_line_error(tmp_path: Path) -> None:
    error = refused()
    assert error.problem == f"There is no kubeconfig at {tmp_path}/.kube/config."
    assert "KUBECONFIG" in error.advice


def test_a_missing_context_gets_suggestions(api: Api) -> None:
    error = refused("trainning")
    assert error.problem.startswith("There is no context 'trainning' in the kubeconfig ")
    assert error.advice == "Did you mean training?"


def test_a_kubeconfig_without_a_current_context_asks_for_one(tmp_path: Path) -> None:
    write_kubeconfig(tmp_path, current="", training="http://127.0.0.1:9")
    error = refused()
    assert "has no current context" in error.problem
    assert error.advice == "Choose one: --context NAME (training)."
    assert "cannot be reached" in refused("training").problem  # that one is found


def test_a_broken_kubeconfig_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(file))
    for text, says in (
        ("contexts: [", "cannot be used"),
        ("[]", "cannot be used"),
        ("", "file is empty"),
        ("contexts: []\ncurrent-context: a\n", "There is no context 'a'"),
        ("contexts: [{name: a, context: {cluster: b, user: c}}]\ncurrent-context: a\n", "cannot be used"),
    ):
        file.write_text(text)
        assert says in refused().problem


def test_a_missing_permission_error_names_the_rbac_rule(api: Api) -> None:
    api.status = 403
    said = (
        'nodes is forbidden: User "robin" cannot list resource "nodes" in API group "" at the cluster scope'
    )
    api.body = json.dumps({"kind": "Status", "status": "Failure", "message": said, "code": 403}).encode()
    error = refused()
    assert said in error.problem
    assert 'resources: ["nodes"], verbs: ["list"]' in error.advice


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b"{}", "(401)"),
        (503, b"no backend", "status 503"),
        (200, b"<html>a login page</html>", "not a Kub"),
    ],
)
def test_other_responses_are_reported_with_their_status(
    api: Api, status: int, body: bytes, says: str
) -> None:
    api.status, api.body = status, body
    assert says in refused().problem


def test_a_missing_library_gives_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert "metaflow-finetune[kubernetes]" in refused().advice


def test_inside_a_pod_its_own_cluster_is_read(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes import config

    def load(client_configuration: Any) -> None:
        client_configuration.host = server

    server = json.loads((tmp_path / ".kube" / "config").read_text())["clusters"][0]["cluster"]["server"]
    (tmp_path / ".kube" / "config").unlink()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(config, "load_incluster_config", load)
    api.nodes = [gke_l4(1)]
    assert read_cluster().context == "in-cluster"
