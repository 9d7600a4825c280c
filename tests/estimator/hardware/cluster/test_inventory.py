"""What a cluster offers a run: nodes beside what uses them, machines that may come, and what is not told."""

from __future__ import annotations

from typing import Any

import pytest

from estimator import hardware
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.inventory import ClusterState, cluster_capacity
from estimator.hardware.cluster.nodes import node_of
from estimator.hardware.cluster.pods import PodRules, Usage, read_usage
from estimator.hardware.cluster.pools import Autoscalers, NodeGroup, pool_of
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import GIB
from tests.estimator.hardware.cluster.test_machines import (
    CPU_NODE,
    bare_metal,
    eks_p5,
    gke_l4,
    karpenter_a100,
)

H100 = "p5.48xlarge"


def state(*nodes: dict[str, Any], **more: Any) -> ClusterState:
    return ClusterState(context="training", nodes=tuple(node_of(node) for node in nodes), **more)


def offers(seen: ClusterState, **rules: Any) -> Cluster:
    return cluster_capacity(seen, hardware.current(), PodRules(**rules))


def used(gpus: int, cpu: float = 8, pod: str = "team/train") -> Usage:
    return Usage(gpus=gpus, cpu=cpu, memory_bytes=64 * GIB, holders=(pod,) if gpus else ())


def name_of(node: dict[str, Any]) -> str:
    return str(node["metadata"]["name"])


def test_nodes_are_grouped_by_free_resources_after_requests_of_daemon_pods() -> None:
    nodes = [eks_p5(number) for number in range(4)]
    busy = {name_of(nodes[0]): used(8), name_of(nodes[1]): used(3), name_of(nodes[2]): used(0, cpu=2)}
    found = {nodes.free_gpus: nodes for nodes in offers(state(*nodes, usage=busy)).nodes}
    assert {free: group.count for free, group in found.items()} == {0: 1, 5: 1, 8: 2}
    idle = found[8].free
    assert idle.cpu == pytest.approx(191.45 - 2)  # the fullest of the two; the other keeps 0.4 for daemons
    assert found[5].holders == ("team/train",)


def test_a_node_without_free_cores_has_no_free_gpus() -> None:
    node = eks_p5(1)
    (group,) = offers(state(node, usage={name_of(node): used(0, cpu=188)})).nodes
    assert group.free_gpus == 3  # 191.45 cores, one for each GPU at least


def test_without_reported_usage_all_gpus_count_as_free() -> None:
    (group,) = offers(state(eks_p5(1))).nodes
    assert group.free is None
    assert group.free_gpus == 8


def test_selector_and_zone_exclude_other_nodes() -> None:
    seen = state(eks_p5(1), eks_p5(2), gke_l4(1))
    assert {group.count for group in offers(seen, zone="us-east-1a").nodes} == {1}
    by_label = offers(seen, node_selector=(("cloud.google.com/gke-nodepool", "l4"),))
    assert [group.instance.name for group in by_label.nodes] == ["g2-standard-8"]


def test_taints_outside_pod_tolerations_and_table_exclude_a_node() -> None:
    node = karpenter_a100(1)
    node["spec"]["taints"].append({"key": "team", "value": "vision", "effect": "NoSchedule"})
    (group,) = offers(state(node)).nodes
    assert group.untolerated_taints == ("team=vision:NoSchedule",)
    assert offers(state(node)).usable.nodes == ()
    assert offers(state(node)).usable.skipped[0].names == ("karpenter-1",)
    own = Toleration(key="team", effect="NoSchedule", value="vision")
    assert offers(state(node), tolerations=(own,)).nodes[0].untolerated_taints == ()
    # Tolerations of the user's own stand instead of the table's
    only = offers(state(node), tolerations=(own,), tolerate_gpu_taints=False)
    assert only.nodes[0].untolerated_taints == ("nvidia.com/gpu=true:NoSchedule",)


def pool(*requirements: tuple[str, str, list[str]], **spec: Any) -> dict[str, Any]:
    rules = [{"key": key, "operator": operator, "values": values} for key, operator, values in requirements]
    of_nodes = {"requirements": rules, "taints": spec.pop("taints", [])}
    of_nodes["nodeClassRef"] = {"group": spec.pop("group", "karpenter.k8s.aws")}
    template = {"spec": of_nodes, "metadata": {"labels": spec.pop("labels", {})}}
    return {"metadata": {"name": "gpus"}, "spec": {"template": template, **spec}}


def pooled(*pools: dict[str, Any], **rules: Any) -> Cluster:
    seen = state(
        CPU_NODE, autoscalers=Autoscalers(pools=tuple(pool_of(item) for item in pools), karpenter=True)
    )
    return offers(seen, **rules)


def machines(cluster: Cluster) -> dict[str, int | None]:
    return {group.instance.name: group.max_new_nodes for group in cluster.nodes}


def test_a_node_pool_without_nodes_offers_the_instance_types_of_its_rules() -> None:
    family = ("karpenter.k8s.aws/instance-family", "In", ["p5", "g6e"])
    listed = machines(pooled(pool(family, ("karpenter.k8s.aws/instance-gpu-count", "Gt", ["3"]))))
    assert H100 in listed
    assert "g6e.12xlarge" in listed
    assert "g6e.xlarge" not in listed
    assert {name.partition(".")[0] for name in listed} == {"p5", "g6e"}
    assert set(listed.values()) == {None}  # no limit
    limited = machines(pooled(pool(family, limits={"nvidia.com/gpu": "8", "cpu": "400"})))
    assert (limited[H100], limited["g6e.48xlarge"], limited["g6e.12xlarge"]) == (1, 1, 2)


def test_a_node_pool_offers_only_machines_of_its_cloud() -> None:
    of_azure = [group.instance for group in pooled(pool(group="karpenter.azure.com")).nodes]
    assert {machine.cloud for machine in of_azure} == {"azure"}
    assert min(machine.gpu_count for machine in of_azure) > 0, "no shares of a GPU"
    assert {group.instance.cloud for group in pooled(pool()).nodes} == {"aws"}
    # A node class that nobody knows: the cloud of the nodes that are there, and none on premises
    assert pooled(pool(group="karpenter.example.com")).nodes == ()


def test_a_node_pool_must_match_the_labels_and_zones_of_the_pods() -> None:
    zoned = pool(("topology.kubernetes.io/zone", "In", ["us-east-1b"]), labels={"team": "nlp"})
    assert pooled(zoned, zone="us-east-1b").nodes
    assert not pooled(zoned, zone="us-east-1a").nodes
    assert not pooled(zoned, node_selector=(("team", "vision"),)).nodes


def groups(*nodes: dict[str, Any], reported: tuple[NodeGroup, ...]) -> Cluster:
    return offers(state(*nodes, autoscalers=Autoscalers(groups=reported)))


def test_a_node_group_offers_more_nodes_of_its_present_type() -> None:
    reported = (
        NodeGroup(name="gke-prod-l4-0a1b-grp", nodes=1, max_nodes=5),
        NodeGroup(name="gke-prod-cpus-2c3d-grp", nodes=1, max_nodes=9),
    )
    cpu = {**CPU_NODE, "metadata": {"name": "c", "labels": {"cloud.google.com/gke-nodepool": "cpus"}}}
    (group,) = groups(gke_l4(1), cpu, reported=reported).nodes
    assert (group.count, group.max_new_nodes, group.guessed) == (1, 4, False)
    assert group.added_by == "the node group gke-prod-l4-0a1b-grp"


def test_nodes_belong_to_the_node_group_with_the_longest_matching_name() -> None:
    spot = gke_l4(2, **{"cloud.google.com/gke-nodepool": "l4-spot", "cloud.google.com/gke-spot": "true"})
    reported = (NodeGroup(name="gke-prod-l4-spot-2c3d-grp", nodes=1, max_nodes=3),)
    by_spot = {group.spot: group.max_new_nodes for group in groups(gke_l4(1), spot, reported=reported).nodes}
    assert by_spot == {None: 0, True: 2}


def test_an_empty_node_group_offers_guessed_machines_of_its_cloud() -> None:
    listed = groups(gke_l4(1), reported=(NodeGroup(name="gke-prod-big-0a1b-grp", nodes=0, max_nodes=2),))
    guesses = [group for group in listed.nodes if group.guessed]
    assert {group.instance.cloud for group in guesses} == {"gcp"}
    assert {group.max_new_nodes for group in guesses} == {2}
    assert not groups(bare_metal("a", {}), reported=(NodeGroup(name="racks", nodes=0, max_nodes=2),)).nodes


def test_unknown_node_groups_are_reported_on_clouds_that_may_have_some() -> None:
    hidden = Autoscalers(unknown="this login may not read it")
    assert "node groups may grow" in offers(state(eks_p5(1), autoscalers=hidden)).notes[0]
    assert offers(state(bare_metal("a", {}), autoscalers=hidden)).unknown == ()


@pytest.mark.parametrize(
    ("provider", "kind", "priced"),
    [
        ("aws:///us-east-1a/i-1", H100, True),
        ("", H100, False),  # called like a machine of a cloud's, and not there
        ("openstack:///abc", "gpu.8xlarge", False),
    ],
)
def test_a_cloud_price_applies_only_to_machines_of_that_cloud(provider: str, kind: str, priced: bool) -> None:
    node = eks_p5(1, labels={"node.kubernetes.io/instance-type": kind})
    node["spec"]["providerID"] = provider
    (group,) = offers(state(node)).nodes
    assert (group.instance.usd_per_hour is not None) is priced


def test_usage_is_summed_by_node_over_pages() -> None:
    def pod(name: str, node: str | None, gpus: str, **more: Any) -> dict[str, Any]:
        container = {"resources": {"requests": {"nvidia.com/gpu": gpus, "cpu": "500m", "memory": "1Gi"}}}
        spec = {"containers": [container], **({"nodeName": node} if node else {}), **more}
        return {"metadata": {"name": name, "namespace": "team"}, "spec": spec}

    pages = [[pod("a", "n1", "2"), pod("b", None, "8")], [pod("c", "n1", "1"), pod("d", "n2", "0")]]

    def get(path: str, **query: str) -> dict[str, Any]:
        assert (path, query["limit"]) == ("/api/v1/pods", "500")
        assert "status.phase!=Succeeded" in query["fieldSelector"]
        number = int(query.get("continue", 0))
        metadata = {"continue": str(number + 1)} if number + 1 < len(pages) else {}
        return {"kind": "PodList", "metadata": metadata, "items": pages[number]}

    usage = read_usage(get)
    assert usage["n1"] == Usage(gpus=3, cpu=1.0, memory_bytes=2 * GIB, holders=("team/a", "team/c"))
    assert usage["n2"].holders == ()
