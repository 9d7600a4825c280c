"""Kueue's queues, looked for on a real API server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from decorators.backends.options import Options
from tests.decorators.backends.kubernetes.conftest import QUEUES, TWO, Asker, rows_of
from tests.lab.control_plane import ControlPlane, permissive_definition, wait_for

pytestmark = pytest.mark.slow


def test_a_queue_is_looked_for_in_kueue(
    ask: Asker, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    options = Options(queue="gpus")
    [(state, found, fix)] = rows_of(ask(options=options)[0], "queue")
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
        wait_for(
            lambda: "no LocalQueue" in str(rows_of(ask(options=options)[0], "queue")), 30, "Kueue is seen"
        )
        assert rows_of(ask(options=options)[0], "queue")[0][2] == "--queue research"
        asked = Options(queue="research")
        first, second = rows_of(ask(options=asked)[0], "queue")
        assert first[:2] == ("ok", "research, of cluster queue all")
        assert second[:2] == ("unknown", "ClusterQueue 'all' does not exist: no job is admitted")
        definition = permissive_definition(
            "clusterqueues", "kueue.x-k8s.io", "v1beta1", "ClusterQueue", "Cluster", tmp_path / "cluster"
        )
        control_plane.install("clusterqueues.kueue.x-k8s.io", definition)
        control_plane.apply(_cluster_queue("0"))
        wait_for(lambda: ask(options=asked)[0].state("queue") == "no", 30, "the ClusterQueue is seen")
        refused = [found for state, found, _ in rows_of(ask(options=asked)[0], "queue") if state == "no"]
        assert refused == [
            "ClusterQueue all has no quota of ephemeral-storage, memory, vpc.amazonaws.com/efa",
            "ClusterQueue all: flavor h100 has 0 of 16 nvidia.com/gpu: it can never admit the run",
        ]

        def short(*queues: dict[str, Any]) -> list[str]:
            """What is refused beside the resources without a quota, which it never admits."""
            control_plane.apply(*queues)
            found = [found for state, found, _ in rows_of(ask(options=asked)[0], "queue") if state == "no"]
            assert found[:1] == refused[:1]
            return found[1:]

        mine = _cluster_queue("0", cohort="everybody")
        others = _cluster_queue("16", name="others", cohort="everybody")
        lends = ", with what cohort everybody lends: it can never admit the run"
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
        wait_for(lambda: told in str(rows_of(ask("alice", options=asked)[0], "queue")), 30, "the role counts")
        assert "cohort" not in str(rows_of(ask("alice", options=asked)[0], "queue"))
        assert short(_cluster_queue("12", name="others", cohort="another"), _cluster_queue("4")) == [
            "ClusterQueue all: flavor h100 has 4 of 16 nvidia.com/gpu: it can never admit the run"
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
