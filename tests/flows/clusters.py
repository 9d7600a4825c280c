"""Clusters of different shapes on a real control plane, and pods that request a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, MinimumRequest, StepRequest
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect
from decorators.backends.kubernetes.request import values_for
from decorators.backends.options import Options
from estimator.hardware.cluster.api import Clock
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Plan
from tests.lab.api import Json
from tests.lab.control_plane import ControlPlane, wait_for

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
FENCE = {"key": "dedicated", "value": "research", "effect": "NoSchedule"}
STATUS = "/api/v1/namespaces/kube-system/configmaps"


def node(name: str, labels: Json, resources: Json, *, provider: str = "", **spec: Any) -> Json:
    """Return a Ready node as described by its kubelet and the cloud controller."""
    reported = {"pods": "110", "ephemeral-storage": "4Ti", **resources}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"providerID": provider, **spec} if provider else spec,
        "status": {
            "allocatable": reported,
            "capacity": reported,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def own_a100(name: str, product: str = "NVIDIA-A100-SXM4-80GB", **spec: Any) -> Json:
    """Return an on-premises node with the labels of GPU feature discovery."""
    labels = {
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.replicas": "1",
    }
    return node(name, labels, {"cpu": "256", "memory": "1950Gi", "nvidia.com/gpu": "8"}, **spec)


def gke(name: str, pool: str, machine: str, gpu: str, cpu: str, memory: str) -> Json:
    """Return a node of GKE; ``gpu``: value of its accelerator label, empty for none."""
    labels = {
        "node.kubernetes.io/instance-type": machine,
        "topology.kubernetes.io/zone": "us-central1-a",
        "cloud.google.com/gke-nodepool": pool,
        **({"cloud.google.com/gke-accelerator": gpu} if gpu else {}),
    }
    resources = {"cpu": cpu, "memory": memory, **({"nvidia.com/gpu": "1"} if gpu else {})}
    taints = {"taints": [GPU_TAINT]} if gpu else {}
    return node(name, labels, resources, provider=f"gce://p/us-central1-a/{name}", **taints)


def cpu_node(name: str, provider: str = "") -> Json:
    return node(name, {}, {"cpu": "16", "memory": "64Gi"}, provider=provider)


def holding(name: str, on: str, gpus: int) -> Json:
    """Return a running pod of another user."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": "8", "memory": "64Gi"}}
    container = {"name": "c", "image": "c", "resources": resources}
    tolerations = [{"operator": "Exists"}]
    spec = {"nodeName": on, "tolerations": tolerations, "containers": [container]}
    return {"metadata": {"name": name}, "spec": spec}


@dataclass
class Shape:
    """A cluster whose shape a test sets; its objects are removed afterwards."""

    plane: ControlPlane
    namespace: str
    _made: list[str] = field(default_factory=list)

    def add(self, *nodes: Json) -> None:
        for body in nodes:
            self.make("/api/v1/nodes", body)
            # Kubernetes 1.20 adds a taint that only a node's lifecycle controller takes away
            name = body["metadata"]["name"]
            taints = body["spec"].get("taints") or None
            self.plane.api().patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints}})

    def make(self, path: str, body: Json) -> None:
        self.plane.api().create(path, body)
        self._made.append(f"{path}/{body['metadata']['name']}")

    def run(self, pod: Json) -> None:
        self.make(f"/api/v1/namespaces/{self.namespace}/pods", pod)

    def end(self, name: str) -> None:
        self.plane.api().delete(f"/api/v1/namespaces/{self.namespace}/pods/{name}", gracePeriodSeconds=0)

    def autoscaler(self, *groups: tuple[str, int, int]) -> None:
        """Return the status of the cluster autoscaler: (group, current nodes, maximum)."""
        lines = [
            f"- name: {name}\n  health: {{cloudProviderTarget: {now}, minSize: 0, maxSize: {largest_group}}}"
            for name, now, largest_group in groups
        ]
        text = "\n".join(["autoscalerStatus: Running", "nodeGroups:", *lines])
        self.make(STATUS, {"metadata": {"name": "cluster-autoscaler-status"}, "data": {"status": text}})

    def forget(self) -> None:
        for path in reversed(self._made):
            self.plane.api().delete(path, gracePeriodSeconds=0)

    def preflight(
        self, plan: Plan, tolerations: tuple[Toleration, ...] = ()
    ) -> tuple[Findings, ClusterFacts]:
        """Return the preflight findings for the request of a plan."""
        return inspect(
            plan.request,
            options=Options(),
            pods=PodSettings(
                namespace=self.namespace, tolerations=tolerations, tolerate_gpu_taints=not tolerations
            ),
            minimum=MinimumRequest(cpu=plan.layout.processes_per_node, memory_bytes=2**30),
            clock=Clock(overall_s=90),
        )

    def submit(self, plan: Plan, tolerations: tuple[Toleration, ...] = ()) -> list[str]:
        """Create one pod per node of the plan with the request of its step; return their names."""
        _, facts = self.preflight(plan, tolerations)
        step_request = StepRequest(backend="kubernetes", request=plan.request)
        values = values_for(replace(step_request, facts=facts))
        sizes = values.resources
        requests = {
            "cpu": f"{sizes['cpu']}",
            "memory": f"{sizes['memory']}M",
            "ephemeral-storage": f"{sizes['disk']}M",
        }
        gpus = {"nvidia.com/gpu": str(sizes["gpu"])} if sizes["gpu"] else {}
        container = {
            "name": "c",
            "image": "c",
            "resources": {"requests": {**requests, **gpus}, "limits": gpus},
        }
        toleration_items = [item.to_dict() for item in tolerations]
        spec = {
            "containers": [container],
            "nodeSelector": values.compute.get("node_selector") or {},
            "tolerations": toleration_items or values.compute.get("tolerations") or [],
        }
        names = [f"run-{number}" for number in range(plan.request.nodes)]
        for name in names:
            self.run({"metadata": {"name": name}, "spec": spec})
        return names

    def node_of(self, pod: str) -> str | None:
        """Return the node on which the scheduler has placed a pod, or None."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}"
        name: str | None = self.plane.api().get(path)["spec"].get("nodeName")
        return name

    def admitted(self, plan: Plan, tolerations: tuple[Toleration, ...] = ()) -> list[str]:
        """Return the nodes on which the real scheduler places the pods of the plan."""
        pods = self.submit(plan, tolerations)
        wait_for(lambda: all(self.node_of(pod) for pod in pods), 60, "the pods are placed", every=0.3)
        return [str(self.node_of(pod)) for pod in pods]


@contextmanager
def shaped(plane: ControlPlane, namespace: str) -> Iterator[Shape]:
    shape = Shape(plane, namespace)
    try:
        yield shape
    finally:
        shape.forget()
