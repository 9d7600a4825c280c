"""Example clusters of vendors (``shapes/*.json``): the plan for each, and the requests of its pods.

Each file has the nodes and networks as the API returns them, and what is expected: the planned machine, the
training pods, the pods of a step without GPUs, and what the preflight reports.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from decorators._metaflow import WaitedJob
from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, MinimumRequest, StepRequest
from decorators.backends.kubernetes import images
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect, inspect_size
from decorators.backends.kubernetes.request import values_for
from decorators.backends.kubernetes.waiting import wait_state
from decorators.backends.options import Options
from decorators.backends.overrides import request_for
from decorators.backends.strategic_merge import merge
from estimator import Job, Plan, Target
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.inventory import read_cluster
from estimator.hardware.cluster.nodes import ARCH
from estimator.models import find
from estimator.plan import GIB, Request
from estimator.planning.goals import Goals
from estimator.planning.planner import plan
from tests.estimator.hardware.cluster.test_machines import Api, serving_api, write_kubeconfig

SHAPES = sorted(Path(__file__).with_name("shapes").glob("*.json"))
NAMESPACE = "train"


@dataclasses.dataclass
class ShapeApi(Api):
    """An API server with the nodes and networks of an example cluster, JobSet, and every permission."""

    networks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pools: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def answer(self, path: str) -> dict[str, Any] | None:
        path_only = urlsplit(path).path
        if "/apis/k8s.cni.cncf.io/" in path_only:
            namespace = path_only.split("/")[5]
            return {"items": [item for item in self.networks if item["metadata"]["namespace"] == namespace]}
        if self.pools and path_only == "/apis/karpenter.sh":
            return {"preferredVersion": {"groupVersion": "karpenter.sh/v1"}}
        if path_only == "/apis/karpenter.sh/v1/nodepools":
            return {"items": self.pools}
        if path_only == "/apis/jobset.x-k8s.io/v1alpha2":
            return {"resources": [{"name": "jobsets"}]}
        if path_only in ("/apis", f"/api/v1/namespaces/{NAMESPACE}"):
            return {"metadata": {}}
        if path_only.endswith(("limitranges", "networkpolicies", "priorityclasses")):
            return {"items": []}
        return super().answer(path)


@contextmanager
def cluster_of(
    shape: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any
) -> Iterator[None]:
    with serving_api(ShapeApi(nodes=shape["nodes"], networks=shape["networks"], **overrides)) as url:
        write_kubeconfig(home, training=url)
        monkeypatch.setenv("KUBECONFIG", str(home / ".kube" / "config"))
        yield


def planned_on(shape: dict[str, Any]) -> tuple[Plan, Cluster]:
    job = shape["job"]
    cluster = read_cluster(gpu=job.get("gpu"))
    target = Target(kind="kubernetes", gpu=job.get("gpu"), nodes=job.get("nodes"))
    size = Job(model=find(job["model"]), method=job["method"], global_batch_size=64, steps=100)
    return plan(size, target, Goals(cluster=cluster)), cluster


def inspected(request: Request, **changes: Any) -> tuple[Findings, ClusterFacts]:
    pods = PodSettings(namespace=NAMESPACE, image="127.0.0.1:9/finetune:1")
    minimum = MinimumRequest(cpu=1, memory_bytes=GIB)
    return inspect(request, options=Options(), pods=dataclasses.replace(pods, **changes), minimum=minimum)


def pod_of(request: Request, facts: ClusterFacts, *, trains: bool) -> dict[str, Any]:
    """Return the distinguishing fields of pods: placement, devices, annotations, variables and sidecars."""
    step = StepRequest(backend="kubernetes", request=request, facts=facts, on_fabric=trains)
    values = values_for(dataclasses.replace(step, options=Options(termination_grace_s=0)))
    template: dict[str, Any] = {"metadata": {}, "spec": {"containers": [{"name": "main", "image": "i"}]}}
    for patch in values.pod_patches:
        template = merge(template, patch)
    template["metadata"]["name"] = "p"
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, "1.32", strict=True)
    container = template["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container.get("env", ())} | values.environment
    values_by_name = {
        "gpu": values.resources["gpu"],
        **{name: values.compute.get(name) for name in ("node_selector", "tolerations", "extended_resources")},
        "annotations": template["metadata"].get("annotations"),
        "network_variables": {
            name: variables[name] for name in ("NCCL_NET", "FI_PROVIDER") if name in variables
        },
        "capabilities": container.get("securityContext", {}).get("capabilities", {}).get("add"),
        "sidecars": [each["name"] for each in template["spec"].get("initContainers", ())],
    }
    return {name: value for name, value in values_by_name.items() if value}


@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.stem)
def test_a_plan_for_each_example_cluster_has_pods_that_fit(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = json.loads(file.read_text())
    with cluster_of(shape, tmp_path, monkeypatch):
        placed, cluster = planned_on(shape)
        train, without = request_for(placed, "train"), request_for(placed, "data")
        findings, facts = inspected(train)
        assert findings.impossible == [], findings.rows
        selected = ((ARCH, facts.arch),) if facts.arch else ()
        pods = PodSettings(namespace=NAMESPACE, node_selector=selected)
        size = inspect_size("prepare", without, options=Options(), pods=pods)
        assert size.impossible == [], size.rows
    (memory,) = {nodes.gpu.vram_gib for nodes in cluster.nodes if nodes.gpu.name == train.gpu_type}
    reported = [f"{row.check}: {row.detail}" for row in findings.rows if row.check in ("fabric", "image")]
    placement = {
        "machine": train.instance_type,
        "gpu": train.gpu_type,
        "gpu_memory_gib": round(memory, 1),
        "gpus": [train.nodes, train.gpus_per_node],
        "usd_per_hour": placed.prediction.usd_per_hour,
        "skipped": [note for note in cluster.notes if note.startswith("Skipped")],
        "reported": [line for line in reported if "does not respond" not in line],
        "train": pod_of(train, facts, trains=True),
        "prepare": pod_of(without, facts, trains=False),
    }
    assert placement == shape["expected"]


def shape_of(name: str) -> dict[str, Any]:
    shape: dict[str, Any] = json.loads(
        Path(__file__).with_name("shapes").joinpath(f"{name}.json").read_text()
    )
    return shape


@pytest.mark.parametrize(
    ("built_for", "states", "selected"),
    [({"amd64"}, ["no"], "amd64"), ({"amd64", "arm64"}, [], None), ({"arm64"}, [], "arm64")],
)
def test_an_image_for_another_architecture_is_refused_and_cpu_steps_select_their_own(
    built_for: set[str],
    states: list[str],
    selected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = shape_of("gh200_arm64")
    monkeypatch.setattr(images, "look_up", lambda *_: (200, frozenset(built_for)))
    with cluster_of(shape, tmp_path, monkeypatch):
        findings, facts = inspected(request_for(planned_on(shape)[0], "train"))
    rows = [row for row in findings.rows if row.check == "image" and row.state != "ok"]
    assert [row.state for row in rows] == states
    assert all("is built for amd64, the nodes are arm64" in row.detail for row in rows)
    assert facts.arch == selected


def test_steps_without_gpus_avoid_gpu_nodes_if_karpenter_can_add_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of("rdma_shared_all_gpu")
    pool = {"metadata": {"name": "cpu"}, "spec": {"template": {"spec": {"requirements": []}}}}
    with cluster_of(shape, tmp_path, monkeypatch, pools=[pool]):
        request = request_for(planned_on(shape)[0], "train")
        assert inspected(request)[1].cpu_tolerations == ()


class QueueApi(Api):
    """An API server with a Job held back by Kueue, third of four in its queue."""

    visible = True

    def answer(self, path: str) -> dict[str, Any] | None:
        kueue, visibility = "/apis/kueue.x-k8s.io", "/apis/visibility.kueue.x-k8s.io"
        pending = [{"metadata": {"name": f"w{n}"}, "positionInLocalQueue": n} for n in range(4)]
        condition = {"type": "QuotaReserved", "status": "False", "message": "no quota of nvidia.com/gpu"}
        workload = {
            "metadata": {"name": "w2", "ownerReferences": [{"name": "train"}]},
            "spec": {"queueName": "h100"},
            "status": {"conditions": [condition]},
        }
        objects: dict[str, dict[str, Any]] = {
            "/apis/batch/v1/namespaces/train/jobs/train": {"spec": {"suspend": True}},
            kueue: {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta1"}},
            f"{kueue}/v1beta1/namespaces/train/workloads": {"items": [workload]},
        }
        if self.visible:
            objects |= {
                visibility: {"preferredVersion": {"groupVersion": "visibility.kueue.x-k8s.io/v1beta1"}},
                f"{visibility}/v1beta1/namespaces/train/localqueues/h100/pendingworkloads": {
                    "items": pending
                },
            }
        return objects.get(urlsplit(path).path) or ({"items": []} if "/pods" in path else None)


@pytest.mark.parametrize(("visible", "position"), [(True, ", position 3 of 4"), (False, "")])
def test_a_run_in_a_full_queue_shows_its_position_if_kueue_reports_it(
    visible: bool, position: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueApi, "visible", visible)
    with serving_api(QueueApi()) as url:
        write_kubeconfig(tmp_path, training=url)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / ".kube" / "config"))
        state = wait_state(WaitedJob(backend="kubernetes", kind="job", name="train", namespace="train"))
    assert state.reason == f"in Kueue's queue h100{position}: no quota of nvidia.com/gpu"


def test_at_least_ten_example_clusters_exist_and_each_has_a_source() -> None:
    assert len(SHAPES) >= 10
    assert all(json.loads(file.read_text())["source"] for file in SHAPES)
