"""Clusters of other shapes on a real control plane: nodes, who uses them, pods as a plan asks for them."""

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
    """A Ready node as its kubelet and the cloud's controller describe it."""
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
    """On premises, with the labels of NVIDIA's GPU feature discovery."""
    labels = {
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.replicas": "1",
    }
    return node(name, labels, {"cpu": "256", "memory": "1950Gi", "nvidia.com/gpu": "8"}, **spec)


def gke(name: str, pool: str, machine: str, gpu: str, cpu: str, memory: str) -> Json:
    """A node of GKE; ``gpu``: as its accelerator label says, empty for none."""
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
    """Somebody's pod that runs there."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": "8", "memory": "64Gi"}}
    container = {"name": "c", "image": "c", "resources": resources}
    tolerations = [{"operator": "Exists"}]
    spec = {"nodeName": on, "tolerations": tolerations, "containers": [container]}
    return {"metadata": {"name": name}, "spec": spec}


@dataclass
class Shape:
    """A cluster while a test gives it a shape; what was made goes with it."""

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
        """The cluster autoscaler's status: (group, nodes that it has, its largest size)."""
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
        """What the preflight says of a plan's request."""
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
        """One pod for each of the plan's nodes, asking for what its step would; their names."""
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
        """Where the scheduler has put a pod; None: nowhere yet."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}"
        name: str | None = self.plane.api().get(path)["spec"].get("nodeName")
        return name

    def admitted(self, plan: Plan, tolerations: tuple[Toleration, ...] = ()) -> list[str]:
        """The nodes on which the real scheduler places the plan's pods."""
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
