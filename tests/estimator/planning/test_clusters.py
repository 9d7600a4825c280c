"""Plans for the nodes that a cluster has: no more of them, and no more of each than can be allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import Job, Target, hardware
from estimator.hardware.cluster import Cluster, ClusterNodes
from estimator.models import find
from estimator.plan import GIB
from estimator.planning.goals import Goals
from estimator.planning.planner import CannotFit, plan, plans

KUBERNETES = Target(kind="kubernetes")
FULL = Job(model=find("llama-70b"), global_batch_size=64)


def nodes_of(name: str, count: int, *, gpus: int | None = None, memory_gib: int = 1000) -> ClusterNodes:
    item = hardware.instance(name)
    item = replace(item, gpu_count=item.gpu_count if gpus is None else gpus)
    return ClusterNodes(
        instance=item,
        gpu=hardware.gpu(item.gpu),
        count=count,
        cpu=90.5,
        memory_bytes=memory_gib * GIB,
        ephemeral_bytes=None,
        efa=4,
        spot=None,
        zones=(),
        taints=(),
        names=tuple(f"node-{number}" for number in range(count)),
    )


def cluster_of(*nodes: ClusterNodes) -> Cluster:
    return Cluster(context="training", nodes=nodes)


def test_a_plan_uses_no_more_nodes_than_the_cluster_has() -> None:
    chosen = plan(FULL, KUBERNETES, Goals(cluster=cluster_of(nodes_of("p4d.24xlarge", 8))))
    assert chosen.request.instance_type == "p4d.24xlarge"
    with pytest.raises(CannotFit, match="does not fit on the requested hardware"):
        plan(FULL, KUBERNETES, Goals(cluster=cluster_of(nodes_of("p4d.24xlarge", 2))))


def test_the_request_is_within_the_allocatable_resources() -> None:
    goals = Goals(cluster=cluster_of(nodes_of("p5.48xlarge", 4, memory_gib=500)))
    chosen = plan(FULL, KUBERNETES, goals)
    assert chosen.request.memory_mib * 2**20 <= 500 * GIB
    assert any("4 of p5.48xlarge" in line for line in chosen.why)


def test_insufficient_host_memory_is_named_in_the_error() -> None:
    goals = Goals(cluster=cluster_of(nodes_of("p5.48xlarge", 4, memory_gib=210)))
    with pytest.raises(CannotFit, match=r"of host memory, has 189\.0 GiB"):
        plan(FULL, replace(KUBERNETES, nodes=2), goals)


def test_insufficient_disk_space_is_named_before_the_launch() -> None:
    small = replace(nodes_of("p4d.24xlarge", 8), ephemeral_bytes=30 * GIB)
    with pytest.raises(CannotFit, match=r"of disk, has 30\.0 GiB.*use nodes with a larger disk"):
        plan(FULL, KUBERNETES, Goals(cluster=cluster_of(small)))
    both = cluster_of(small, replace(nodes_of("p5.48xlarge", 2), ephemeral_bytes=2**42))
    assert plan(FULL, KUBERNETES, Goals(cluster=both)).request.instance_type == "p5.48xlarge"
    assert plan(FULL, KUBERNETES, Goals(cluster=cluster_of(small).with_any_disk)).prediction.memory.fits


def test_only_labeled_nodes_and_new_nodes_can_be_spot() -> None:
    here = nodes_of("p5.48xlarge", 2)
    come = replace(here, count=0, max_new_nodes=None)
    nodes = (here, replace(here, spot=True), come, replace(come, max_new_nodes=0), replace(come, spot=False))
    assert [each.could_be_spot for each in nodes] == [False, True, True, False, False]


def test_nodes_without_a_price_are_ranked_by_speed() -> None:
    here = nodes_of("p5.48xlarge", 4)
    unpriced = replace(here, instance=replace(here.instance, usd_per_hour=None, name="own-h100"))
    ranked = plans(FULL, KUBERNETES, Goals(cluster=cluster_of(unpriced)), top=10)
    speeds = [made.prediction.tokens_per_second or 0 for made in ranked.plans]
    assert speeds == sorted(speeds, reverse=True)
    assert ranked.best.prediction.usd_per_hour is None


def test_nodes_whose_efa_devices_are_in_use_communicate_over_tcp() -> None:
    fast = nodes_of("p5.48xlarge", 4)
    slow = replace(fast, efa=0)
    speeds = [
        plan(
            FULL, replace(KUBERNETES, nodes=4), Goals(cluster=cluster_of(nodes))
        ).prediction.tokens_per_second
        for nodes in (fast, slow)
    ]
    assert (speeds[0] or 0) > (speeds[1] or 0) > 0
