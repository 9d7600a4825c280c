"""Which machines of a cluster a plan may use: what is free first, then what others hold, within quotas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator import Job, Target, UserError, hardware
from estimator.hardware.cluster import Cluster, ClusterNodes, Free, SkippedNodes
from estimator.hardware.cluster.quotas import Quota
from estimator.models import find
from estimator.plan import GIB
from estimator.planning.goals import Goals
from estimator.planning.obstacles import explain, taints_of
from estimator.planning.places import Place, choose_places
from estimator.planning.planner import CannotFit, plan
from tests.estimator.planning.test_clusters import nodes_of

KUBERNETES = Target(kind="kubernetes")
LORA = Job(model=find("llama-8b"), method="lora", engine="torchtune")
FULL = Job(model=find("llama-70b"), method="full", engine="torchtune", global_batch_size=64)
TINY = Job(model=find("tiny-llama"), engine="torchtune", seq_len=256)
GPUS = "requests.nvidia.com/gpu"


def cluster_of(*nodes: ClusterNodes, **more: Any) -> Cluster:
    return Cluster(context="training", nodes=nodes, **more)


def with_free_gpus(nodes: ClusterNodes, gpus: int) -> ClusterNodes:
    """With so many GPUs free on each."""
    free = Free(gpus=gpus, cpu=nodes.cpu / 2, memory_bytes=nodes.memory_bytes // 2)
    return replace(nodes, free=free, holders=("team/train",))


def places(*nodes: ClusterNodes, target: Target = KUBERNETES, **more: Any) -> list[Place]:
    return choose_places(LORA, target, Goals(cluster=cluster_of(*nodes, **more)))


def test_free_nodes_rank_before_busy_ones() -> None:
    p5 = nodes_of("p5.48xlarge", 2)
    free, busy = places(p5, with_free_gpus(p5, 0))
    assert (free.tier, free.gpus, free.max_nodes, free.free_nodes) == (0, 8, 2, 2)
    assert (busy.tier, busy.gpus, busy.max_nodes, busy.free_nodes) == (1, 8, 4, 0)
    assert busy.notes[-1] == "the run waits: 16 of these 32 H100 SXM are in use now, by team/train"


def test_a_shared_node_offers_a_power_of_two_of_gpus_and_their_share() -> None:
    part, _ = places(with_free_gpus(nodes_of("p5.48xlarge", 1), 5))
    assert (part.gpus, part.tier) == (4, 0)
    assert part.vcpu == int(int(90.5 / 2 * 0.9) * 4 / 5)
    whole = hardware.instance("p5.48xlarge").usd_per_hour
    assert part.usd_per_hour == pytest.approx(whole * 4 / 5)


def test_possible_new_nodes_add_to_present_ones() -> None:
    there = nodes_of("p5.48xlarge", 2)
    more = replace(there, count=0, max_new_nodes=3, added_by="Karpenter's NodePool gpus", names=())
    (place,) = places(there, more)
    assert (place.max_nodes, place.free_nodes) == (5, 2)
    assert "Karpenter's NodePool gpus may add 3 of p5.48xlarge" in place.notes
    (endless,) = places(replace(more, max_new_nodes=None))
    assert endless.max_nodes is None


def test_named_machines_and_clouds_exclude_all_others() -> None:
    mixed = (nodes_of("p5.48xlarge", 1), nodes_of("p4d.24xlarge", 1))
    (place,) = places(*mixed, target=replace(KUBERNETES, instance_type="P4D.24xlarge"))
    assert place.name == "p4d.24xlarge"
    with pytest.raises(UserError, match="No node of the cluster of context training matches --cloud gcp"):
        places(*mixed, target=replace(KUBERNETES, cloud="gcp"))


def test_only_instance_types_with_known_resources_are_requested_from_a_cluster() -> None:
    for target, known in ((KUBERNETES, True), (Target(kind="catalogue"), False)):
        found = choose_places(LORA, target, Goals())
        assert all(place.vcpu and place.ram_bytes for place in found) == known


def test_a_guessed_machine_is_used_only_if_the_user_names_it() -> None:
    guess = replace(nodes_of("p5.48xlarge", 0), max_new_nodes=2, guessed=True, added_by="the node group big")
    with pytest.raises(UserError, match="it has"):
        places(guess)
    (place,) = places(guess, target=replace(KUBERNETES, instance_type="p5.48xlarge"))
    assert place.tier == 2


def quota(most: float, used: float = 0, what: str = GPUS) -> Quota:
    return Quota(name="team", key=what, limit=most, used=used)


@pytest.mark.parametrize(("most", "gpus", "nodes"), [(16, 8, 2), (12, 8, 1), (7, 4, 1), (1, 1, 1)])
def test_a_gpu_quota_limits_nodes_and_parts_of_a_node(most: int, gpus: int, nodes: int) -> None:
    (place,) = places(nodes_of("p5.48xlarge", 4), quotas=(quota(most),))
    assert (place.gpus, place.max_nodes) == (gpus, nodes)


def test_a_quota_that_is_in_use_is_waited_for() -> None:
    now, later = places(nodes_of("p5.48xlarge", 4), quotas=(quota(16, used=12),))
    assert (now.gpus, now.tier) == (4, 0)
    assert (later.gpus, later.max_nodes, later.tier) == (8, 2, 1)
    assert later.notes[-1] == f"the run waits: of ResourceQuota team 12 of 16 {GPUS} are in use now"


def test_cpu_and_memory_quotas_limit_the_sum_of_all_nodes() -> None:
    cpu, memory = quota(100, what="requests.cpu"), quota(300 * GIB, what="memory")
    (place,) = places(nodes_of("p5.48xlarge", 4), quotas=(cpu, memory))
    assert (place.vcpu, place.ram_bytes, place.max_nodes) == (81, 300 * GIB, 1)


def test_a_cluster_without_gpus_trains_a_small_model_on_cpus() -> None:
    chosen = plan(TINY, KUBERNETES, Goals(cluster=cluster_of(nodes_without_gpu=3)))
    assert chosen.layout.device == "cpu"
    assert any(
        "the cluster of context training has no GPU, and the model is small" in line for line in chosen.why
    )
    for goals in (
        Goals(cluster=cluster_of(skipped=(SkippedNodes(reason="cordoned", names=("a",)),))),
        Goals(cluster=cluster_of(), instance_types=("p5.48xlarge",)),
    ):
        with pytest.raises(UserError, match="No node of the cluster") as caught:
            plan(TINY, KUBERNETES, goals)
        assert "or use --device cpu" in caught.value.advice
    with pytest.raises(UserError) as caught:
        plan(LORA, KUBERNETES, Goals(cluster=cluster_of()))
    assert "--device cpu" not in caught.value.advice


def reported(job: Job, cluster: Cluster) -> UserError:
    with pytest.raises(UserError) as caught:
        plan(job, KUBERNETES, Goals(cluster=cluster.usable))
    return explain(caught.value, job, KUBERNETES, cluster)


def test_a_blocking_taint_is_named_with_its_toleration() -> None:
    taints = ("team=vision:NoSchedule", "nvidia.com/gpu:NoSchedule")
    fenced = replace(nodes_of("p5.48xlarge", 8), taints=taints, untolerated_taints=taints[:1])
    cluster = cluster_of(fenced, nodes_of("g6e.xlarge", 1))
    error = reported(FULL, cluster)
    assert "untolerated taint team=vision:NoSchedule: 8x H100 SXM of node-0, node-1" in error.problem
    assert '"key":"team"' in error.advice
    assert '"key":"nvidia.com/gpu"' in error.advice
    opened = plan(FULL, KUBERNETES, Goals(cluster=cluster))
    assert taints_of(opened, cluster) == taints
    assert taints_of(opened, cluster_of(replace(fenced, untolerated_taints=()))) == ()


def test_a_blocking_quota_is_named_with_its_figures() -> None:
    cluster = cluster_of(nodes_of("p5.48xlarge", 8), quotas=(quota(4, used=1),))
    error = reported(FULL, cluster)
    assert error.problem.startswith(
        f"ResourceQuota team allows 4 {GPUS} (1 of them in use); llama-70b (full)"
    )
    assert not isinstance(error, CannotFit)


def test_an_unknown_instance_type_is_reported_with_the_option_that_sets_it() -> None:
    guess = replace(nodes_of("p5.48xlarge", 0), max_new_nodes=8, guessed=True, added_by="the node group big")
    error = reported(FULL, cluster_of(nodes_of("g6e.xlarge", 1), guess))
    assert "the node group big may add nodes of an unknown instance type" in error.problem
    assert "--instance-type p5.48xlarge" in error.advice


def test_without_an_obstacle_the_planner_error_is_shown_without_other_machines() -> None:
    error = reported(FULL, cluster_of(nodes_of("g6e.xlarge", 2)))
    assert isinstance(error, CannotFit)
    assert error.example_plan is None


def test_more_gpus_per_node_than_nvlink_connects_are_refused_with_the_number_of_nodes() -> None:
    job = Job(model=find("llama-8b"), method="lora", global_batch_size=20)
    with pytest.raises(UserError, match="instance types with H100 SXM have at most 8") as error:
        plan(job, Target(kind="catalogue", gpu="H100 SXM", gpus=20))
    assert "--gpus 8 --nodes 3" in error.value.advice
    over_pcie = plan(job, Target(kind="catalogue", gpu="RTX 4090", gpus=10))
    assert over_pcie.layout.world_size == 10
