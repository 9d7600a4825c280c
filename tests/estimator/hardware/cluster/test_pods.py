"""What daemon pods ask for is counted as the scheduler counts it, and only where it is told."""

from __future__ import annotations

from typing import Any

from estimator.hardware.cluster.pods import SAMPLED_NODES, largest_daemon_requests
from estimator.hardware.cluster.tables import PodResources

MIB = 2**20


def _pod(owner: str | None, *requests: tuple[str, str], **spec: Any) -> dict[str, Any]:
    containers = [{"resources": {"requests": {"cpu": cpu, "memory": memory}}} for cpu, memory in requests]
    owners = [{"kind": owner}] if owner else []
    return {
        "metadata": {"name": "pod", "ownerReferences": owners},
        "spec": {"containers": containers, **spec},
    }


class _Nodes:
    """Answers for pods by node, and keeps what was asked."""

    def __init__(self, **pods: list[dict[str, Any]]) -> None:
        self.pods, self.asked = pods, [""]

    def get(self, path: str, **query: str) -> dict[str, Any]:
        assert path == "/api/v1/pods"
        self.asked.append(query["fieldSelector"])
        name = query["fieldSelector"].split(",")[0].partition("=")[2]
        items = [{**pod, "spec": {**pod["spec"], "nodeName": name}} for pod in self.pods[name]]
        return {"kind": "PodList", "items": items}


def test_pods_of_daemon_sets_and_of_the_node_itself_are_summed() -> None:
    sidecar = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "5m", "memory": "8Mi"}}}
    first = {"resources": {"requests": {"cpu": "300m"}}}  # more than all that runs after it
    cluster = _Nodes(
        a=[
            _pod("DaemonSet", ("25m", "40Mi"), ("25m", "20Mi")),
            _pod("Node", ("100m", "0")),
            _pod("DaemonSet", ("10m", "40Mi"), initContainers=[sidecar, first]),
            _pod("DaemonSet", ("0", "0"), overhead={"cpu": "50m"}),
            _pod("DaemonSet", containers=[{}]),
            _pod("Job", ("48", "1000Gi")),
            _pod(None, ("1", "1Gi")),
        ]
    )
    room = largest_daemon_requests(cluster.get, ["a"])
    assert room == PodResources(cpu=0.05 + 0.1 + 0.3 + 0.05, memory_bytes=108 * MIB)
    assert "status.phase!=Succeeded" in cluster.asked[-1]


def test_daemon_requests_are_the_maximum_over_a_few_sampled_nodes() -> None:
    light, heavy = [_pod("DaemonSet", ("100m", "2Gi"))], [_pod("DaemonSet", ("1", "1Gi"))]
    cluster = _Nodes(**{f"n{i}": heavy if i == 1 else light for i in range(9)})
    assert largest_daemon_requests(cluster.get, [f"n{i}" for i in range(9)]) == PodResources(
        cpu=1, memory_bytes=2048 * MIB
    )
    assert len(cluster.asked) - 1 == SAMPLED_NODES


def test_daemon_requests_are_unknown_without_nodes_or_daemon_pods() -> None:
    cluster = _Nodes(a=[_pod("DaemonSet", ("100m", "1Gi"))], new=[_pod("Job", ("1", "1Gi"))])
    assert largest_daemon_requests(cluster.get, ["a", "new"]) is None
    assert largest_daemon_requests(cluster.get, []) is None
