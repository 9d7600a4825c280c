"""Plans of the real planner for clusters, and nodes as returned by an API server."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from estimator import Job, Plan, Target, plan
from estimator.hardware.cluster.nodes import Node, node_of
from estimator.models import find

# What a container gets where EFA is asked for
EFA_VARIABLES = {"FI_PROVIDER": "efa", "NCCL_NET_PLUGIN": "libnccl-net.so"}

# model, method, GPU type, nodes: on one node where that is enough
CASES = (
    ("llama-8b", "lora", "L40S", 1),
    ("llama-8b", "full", "A100-80GB", 1),
    ("llama-70b", "full", "H100", 4),
    ("llama-70b", "full", "H200", 2),
    ("mixtral-8x7b", "full", "A100-80GB", 4),
)


@lru_cache(maxsize=32)
def planned(
    model: str, method: Any, gpu: str, nodes: int, kind: Any = "kubernetes", cloud: str = "aws"
) -> Plan:
    target = Target(kind=kind, gpu=gpu, nodes=nodes, cloud=cloud)
    return plan(Job(model=find(model), method=method, global_batch_size=64, steps=100), target)


def node_object(name: str, **overrides: Any) -> dict[str, Any]:
    """Return a Ready node with 8 H100, as on EKS with the device plugins of NVIDIA and AWS.

    ``labels``, ``resources`` and ``taints`` are laid over; a resource of None is left out.
    """
    labels = {
        "kubernetes.io/hostname": name,
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "topology.kubernetes.io/zone": "us-east-1a",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        **overrides.get("labels", {}),
    }
    resources = {
        "cpu": "191450m",
        "memory": "1950Gi",
        "ephemeral-storage": "4000Gi",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "32",
        "hugepages-2Mi": "10256Mi",
        "pods": "100",
        **overrides.get("resources", {}),
    }
    reported = {key: value for key, value in resources.items() if value is not None}
    return {
        "metadata": {"name": name, "labels": {k: v for k, v in labels.items() if v is not None}},
        "spec": {
            "taints": overrides.get("taints", []),
            "providerID": overrides.get("provider", f"aws:///us-east-1a/i-{name}"),
            "unschedulable": overrides.get("unschedulable", False),
        },
        "status": {
            "allocatable": reported,
            "capacity": reported,
            "conditions": [{"type": "Ready", "status": "True" if overrides.get("ready", True) else "False"}],
        },
    }


def node(name: str, **overrides: Any) -> Node:
    return node_of(node_object(name, **overrides))
