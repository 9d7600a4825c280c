"""Faults of a cluster during a training run, and the state of the run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.flows.faults import Node as TrainingTask
from tests.kubernetes.cluster import NAMESPACE, Cluster, Launched
from tests.lab.api import Json
from tests.lab.control_plane import wait_for
from tests.lab.kubelet import Node

BIG = "--with=kubernetes:cpu=40"  # more than half of a node's
LIMIT_S = 1500  # for a machine that does ten other things


def worker_of(pods: dict[str, Json]) -> str:
    """Return the worker pod and its node in the format of the terminal."""
    return f"{pods['worker']['metadata']['name']} on {pods['worker']['spec']['nodeName']}"


def delete(cluster: Cluster, pod: Json) -> None:
    """Delete a pod like ``kubectl delete pod``, with its grace period."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
    cluster.api.delete(path, gracePeriodSeconds=pod["spec"]["terminationGracePeriodSeconds"])


def lose_a_node(cluster: Cluster, pods: dict[str, Json]) -> None:
    """Lose the node of the worker; another node is added."""
    lost = cluster.kubelet_of(pods["worker"])
    cluster.add_node(Node(name=f"{lost.node.name}-new", instance_type=lost.node.instance_type))
    lost.lose()
    control = cluster.pod(pods["control"])
    if control is not None:  # the two were on different nodes: nobody tells the other one but the gang
        wait_for(lambda: control.poll() is not None, 120, "the other node's task ends by itself")
    lost.forget()
    cluster.kubelets.remove(lost)


@contextlib.contextmanager
def drained(cluster: Cluster, pod: Json) -> Iterator[None]:
    """Drain the node of a pod with kubectl, by eviction; it accepts pods again after the block."""
    plane, node = cluster.control_plane, pod["spec"]["nodeName"]
    output = plane.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=100s")
    assert f"node/{node} cordoned" in output
    assert f"pod/{pod['metadata']['name']} evicted" in output
    assert f"node/{node} drained" in output
    yield
    plane.kubectl("uncordon", node)


@contextlib.contextmanager
def one_node_short(cluster: Cluster) -> Iterator[None]:
    """Add one of the nodes only after the block; each accepts one pod of a run with ``BIG``."""
    late = cluster.kubelets.pop()
    late.lose()
    late.forget()
    try:
        yield
    finally:
        cluster.add_node(late.node)


def delete_in_a_checkpoint(cluster: Cluster, pod: Json) -> None:
    """Delete the worker pod and notify its task while its rank writes a checkpoint.

    The rank is held up there until the task has heard: a checkpoint is written in less time than that takes.
    """
    running = cluster.pod(pod)
    assert running is not None
    (work,) = Path(f"/proc/{running.pids()[-1]}/root/tmp").glob("metaflow-finetune-*/*-train*")
    task = TrainingTask(work, 0)
    (rank,) = (pid for pid in running.pids() if _own_number(pid) == task.rank_pid(1))
    deadline = time.monotonic() + LIMIT_S
    while not task.writes_checkpoint(1):
        assert time.monotonic() < deadline, "a checkpoint is written"
        time.sleep(0.001)
    os.kill(rank, signal.SIGSTOP)
    try:
        assert task.writes_checkpoint(1), "it was written before the rank was held up"
        delete(cluster, pod)
        wait_for((work / "node" / "leave" / "asked").exists, 30, "the task has heard that it has to go")
    finally:
        os.kill(rank, signal.SIGCONT)


def _own_number(pid: int) -> int:
    """Return the process id inside the pod."""
    return int(re.findall(r"NSpid:.*\s(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def training(cluster: Cluster, run: Launched, *, attempt: int = 0) -> dict[str, Json]:
    """Wait for the two pods of an attempt, by kind, until they have saved a checkpoint."""

    def pods() -> dict[str, Json]:
        assert run.process.poll() is None, run.full_log()
        if not run.has_begun:
            return {}
        return {
            pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]: pod
            for pod in cluster.pods()
            if pod["metadata"].get("annotations", {}).get("metaflow/run_id") == run.run_id
            and "jobset.sigs.k8s.io/jobset-name" in pod["metadata"]["labels"]
            and pod["metadata"]["annotations"].get("metaflow/attempt") == str(attempt)
            and pod["status"].get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        }

    wait_for(lambda: len(pods()) == 2, LIMIT_S, f"attempt {attempt} trains", every=0.5)
    placed_pods = pods()
    before = committed(cluster, run)

    def saved() -> bool:
        assert run.process.poll() is None, run.full_log()
        return committed(cluster, run) > before

    wait_for(saved, LIMIT_S, f"attempt {attempt} saves a checkpoint after step {before}", every=0.2)
    return placed_pods


def committed(cluster: Cluster, run: Launched) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    keys = cluster.store.keys_below(f"metaflow/FinetuneFlow/finetune/checkpoints/{run.run_id}/")
    steps = [re.search(r"/step-(\d+)[^/]*/checkpoint\.json$", key) for key in keys]
    return max((int(match[1]) for match in steps if match), default=0)


def attempt_ends(cluster: Cluster, pods: dict[str, Json]) -> None:
    """Wait up to two minutes until all pods have ended."""
    names = {pod["metadata"]["name"] for pod in pods.values()}
    wait_for(lambda: not names & set(cluster.running()), 120, f"the pods {names} end")


def wait_for_line(run: Launched, pattern: str) -> None:
    def output() -> Any:
        assert run.process.poll() is None, run.full_log()
        return re.search(pattern, run.log)

    wait_for(output, LIMIT_S, f"the run says {pattern!r}", every=0.5)
