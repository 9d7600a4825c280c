"""Whether nodes that are not there yet could come: Karpenter's NodePools, and node groups of clouds."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from estimator import hardware
from estimator.hardware.cluster import pools as cluster_pools
from estimator.hardware.cluster.api import ApiRefusedError
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.pools import Growth, NodePool, could_grow, pool_of, read_autoscalers
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Request
from tests.decorators.backends.plans import planned

REQUEST = planned("llama-70b", "full", "H100", 2).request  # p5.48xlarge


def _pool(*requirements: tuple[str, str, list[str]], **spec: Any) -> NodePool:
    return pool_of(_object(*requirements, **spec))


def refusal(pool: NodePool, request: Request, **rules: Any) -> str | None:
    return cluster_pools.refusal(pool, request, PodRules(**rules))


def _object(*requirements: tuple[str, str, list[str]], **spec: Any) -> dict[str, Any]:
    """A NodePool as the API server tells it; ``taints`` are its nodes', ``used`` is its status."""
    listed = [{"key": key, "operator": operator, "values": values} for key, operator, values in requirements]
    of_nodes = {"requirements": listed, "taints": spec.pop("taints", [])}
    status = {"resources": spec.pop("used", {})}
    return {"metadata": {"name": "gpus"}, "spec": {"template": {"spec": of_nodes}, **spec}, "status": status}


@pytest.mark.parametrize(
    "requirement",
    [
        ("node.kubernetes.io/instance-type", "In", ["p4d.24xlarge", "p5.48xlarge"]),
        ("karpenter.k8s.aws/instance-family", "In", ["p5"]),
        ("karpenter.k8s.aws/instance-category", "In", ["p", "g"]),
        ("karpenter.k8s.aws/instance-gpu-name", "In", ["h100"]),
        ("karpenter.k8s.aws/instance-gpu-count", "Gt", ["0"]),
        ("karpenter.k8s.aws/instance-gpu-count", "Exists", []),
        ("karpenter.k8s.aws/instance-generation", "Gt", ["4"]),
        ("karpenter.k8s.aws/instance-cpu", "In", ["96", "192"]),
        ("eks.amazonaws.com/instance-size", "In", ["48xlarge"]),
        ("karpenter.sh/capacity-type", "In", ["spot"]),  # nothing is known that speaks against it
    ],
)
def test_a_node_pool_that_allows_the_machine_may_add_it(requirement: tuple[str, str, list[str]]) -> None:
    assert refusal(_pool(requirement), REQUEST) is None


@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        (("node.kubernetes.io/instance-type", "In", ["g5.xlarge"]), "instance-type In g5.xlarge"),
        (("karpenter.k8s.aws/instance-category", "NotIn", ["p"]), "instance-category NotIn p"),
        (("karpenter.k8s.aws/instance-gpu-count", "Lt", ["8"]), "instance-gpu-count Lt 8"),
        (("eks.amazonaws.com/instance-gpu-name", "In", ["l4"]), "instance-gpu-name In l4"),
        (("karpenter.k8s.aws/instance-gpu-name", "DoesNotExist", []), "DoesNotExist"),
        (("kubernetes.io/arch", "In", ["arm64"]), "arch In arm64"),
        (("kubernetes.io/arch", "Gt", ["4"]), "arch Gt 4"),  # a label that is no number matches nothing
        (("karpenter.k8s.aws/instance-gpu-count", "Lt", ["many"]), "instance-gpu-count Lt many"),
        (("karpenter.k8s.aws/instance-gpu-count", "Gt", ["0.5"]), "instance-gpu-count Gt 0.5"),
        (("karpenter.k8s.aws/instance-gpu-count", "Gt", []), "instance-gpu-count Gt"),
    ],
)
def test_a_node_pool_that_excludes_the_machine_is_reported_with_its_rule(requirement: Any, why: str) -> None:
    assert why in (refusal(_pool(requirement), REQUEST) or "")


def test_node_pool_limits_include_resources_already_started() -> None:
    assert refusal(_pool(limits={"nvidia.com/gpu": 16}), REQUEST) is None
    assert (
        refusal(_pool(limits={"nvidia.com/gpu": 8}), REQUEST)
        == "its limits (nvidia.com/gpu 8) leave room for 1 of 2 p5.48xlarge"
    )
    some_used = _pool(limits={"nvidia.com/gpu": "24"}, used={"nvidia.com/gpu": "16", "cpu": "400"})
    assert "leave room for 1 of 2" in (refusal(some_used, REQUEST) or "")
    assert "(cpu 200) leave room for 1" in (refusal(_pool(limits={"cpu": "200"}), REQUEST) or "")
    assert some_used.machines_left(hardware.instance("p5.48xlarge")) == 1
    assert _pool().machines_left(hardware.instance("p5.48xlarge")) is None


def test_node_pools_with_untolerated_taints_add_no_nodes() -> None:
    of_gpus = _pool(taints=[{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}])
    assert refusal(of_gpus, REQUEST) is None
    assert "taint nvidia.com/gpu=true:NoSchedule" in (
        refusal(of_gpus, REQUEST, tolerate_gpu_taints=False) or ""
    )
    of_team = _pool(taints=[{"key": "team", "value": "vision", "effect": "NoSchedule"}])
    assert "its nodes have the taint team=vision:NoSchedule" in (refusal(of_team, REQUEST) or "")
    ours = Toleration(key="team", effect="NoSchedule", value="vision")
    assert refusal(of_team, REQUEST, tolerations=(ours,)) is None


def test_node_pools_outside_the_selected_labels_or_zones_add_no_nodes() -> None:
    zoned = _pool(("topology.kubernetes.io/zone", "In", ["us-east-1b"]))
    assert refusal(zoned, REQUEST, zone="us-east-1b") is None
    assert "zone In us-east-1b" in (refusal(zoned, REQUEST, zone="us-east-1a") or "")
    team = replace(zoned, labels=(("team", "nlp"),))
    assert refusal(team, REQUEST, node_selector=(("team", "vision"),)) == "team is nlp"
    assert refusal(team, replace(REQUEST, node_labels=(("team", "vision"),))) == "team is nlp"


def test_growth_reports_the_tolerations_for_new_nodes() -> None:
    tainted = _object(taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
    assert _grown(_cluster([tainted])).tolerations == (Toleration(key="nvidia.com/gpu", effect="NoSchedule"),)


@pytest.mark.parametrize(
    ("values", "spot"), [(["spot"], True), (["on-demand"], False), (["spot", "on-demand"], None)]
)
def test_the_capacity_type_rule_decides_whether_a_node_pool_is_spot(
    values: list[str], spot: bool | None
) -> None:
    assert _pool(("karpenter.sh/capacity-type", "In", values)).spot is spot


def test_on_demand_node_pools_add_no_nodes_for_a_spot_run() -> None:
    spot = replace(REQUEST, spot=True)
    on_demand = _pool(("karpenter.sh/capacity-type", "In", ["on-demand"]))
    assert refusal(on_demand, spot) == "karpenter.sh/capacity-type In on-demand"
    assert refusal(on_demand, REQUEST) is None
    either = ("karpenter.sh/capacity-type", "In", ["on-demand", "spot"])
    assert refusal(_pool(either), spot) is None
    assert _grown(_cluster([_object(either)])).by_karpenter


@pytest.mark.parametrize(
    ("requirement", "refused"),
    [
        (("karpenter.azure.com/sku-family", "In", ["D"]), True),
        (("karpenter.azure.com/sku-family", "In", ["N"]), False),
        (("karpenter.azure.com/sku-gpu-count", "Gt", ["1"]), False),
        (("karpenter.azure.com/sku-name", "In", ["Standard_NC24ads_A100_v4"]), True),
    ],
)
def test_rules_of_aks_are_read_too(requirement: Any, refused: bool) -> None:
    request = dataclasses.replace(REQUEST, instance_type="Standard_ND96isr_H100_v5", nodes=1)
    assert bool(refusal(_pool(requirement), request)) is refused


def _cluster(pools: list[dict[str, Any]] | None, status: str | None = None) -> Any:
    def get(path: str, **query: str) -> dict[str, Any]:
        if path.endswith("/kube-system/configmaps/cluster-autoscaler-status") and status is not None:
            return {"data": {"status": status}}
        if pools is None or path.endswith("/configmaps/cluster-autoscaler-status"):
            raise ApiRefusedError(404, "not found")
        if path == "/apis/karpenter.sh":
            return {"preferredVersion": {"groupVersion": "karpenter.sh/v1"}}
        assert path == "/apis/karpenter.sh/v1/nodepools"
        return {"items": pools}

    return get


def _is_allowed(verb: str, resource: str, **where: str) -> bool:
    return (verb, resource, where) == (
        "get",
        "configmaps",
        {"namespace": "kube-system", "name": "cluster-autoscaler-status"},
    )


def _grown(get: Any, *clouds: str, may: Any = _is_allowed) -> Growth:
    return could_grow(read_autoscalers(get, may), REQUEST, frozenset(clouds), PodRules())


@pytest.mark.parametrize("clouds", [(), ("gcp",), ("aws",)])
def test_without_an_autoscaler_no_nodes_are_added(clouds: tuple[str, ...]) -> None:
    grown = _grown(_cluster(None), *clouds)
    assert not grown.possible
    assert grown.why == "no autoscaler found"


def test_if_all_node_pools_refuse_the_reason_lists_them() -> None:
    pools = [_object(("kubernetes.io/arch", "In", ["arm64"]))]
    grown = _grown(_cluster(pools), "aws")
    assert not grown.possible
    assert "gpus: kubernetes.io/arch In arm64" in grown.why
    assert _grown(_cluster([*pools, _object()])).why.endswith("may add them")


# As cluster autoscalers since 1.30 write it; a target of 0 is left out
GROUPS = """
autoscalerStatus: Running
nodeGroups:
- name: https://www.googleapis.com/compute/v1/projects/p/zones/z/instanceGroups/gke-gpus-grp
  health: {{status: Healthy, minSize: 0, maxSize: {most}}}
- name: cpus
  health: {{status: Healthy, cloudProviderTarget: 3, minSize: 1, maxSize: 3}}
"""


def test_the_status_of_the_cluster_autoscaler_shows_which_group_can_grow() -> None:
    grown = _grown(_cluster(None, GROUPS.format(most=4)))
    assert grown.possible  # on premises too
    assert grown.why == "the cluster autoscaler may add nodes to gke-gpus-grp (0 of 4 nodes)"


def test_node_groups_at_maximum_size_are_reported() -> None:
    full = _cluster(None, GROUPS.format(most=0))
    assert not _grown(full).possible
    grown = _grown(full, "gcp")
    assert not grown.possible
    assert grown.why == "all node groups of the cluster autoscaler have their largest size"


@pytest.mark.parametrize(
    "status",
    [
        None,
        "",
        "Cluster-autoscaler status at 2023-01-01:\nCluster-wide:\n  Health: Healthy (ready=3)\n",
        "nodeGroups: [{name: a, health: {maxSize: many}}]",
        "{",
    ],
)
def test_an_unreadable_status_is_ignored(status: str | None) -> None:
    assert not _grown(_cluster(None, status)).possible
    assert _grown(_cluster(None, status), "aws").possible is (status is not None)


def test_the_text_status_of_older_autoscalers_is_read() -> None:
    text = """Cluster-autoscaler status at 2023-01-01 01:02:03 +0000 UTC:
Cluster-wide:
  Health:      Healthy (ready=3 unready=0 notStarted=0 registered=3 longUnregistered=0)
NodeGroups:
  Name:        gke-c-gpus-0a1b-grp
  Health:      Healthy (ready=1 unready=0 registered=1 cloudProviderTarget=1 (minSize=0, maxSize=5))
  ScaleUp:     NoActivity (ready=1 cloudProviderTarget=1)

  Name:        gke-c-cpus-2c3d-grp
  Health:      Healthy (ready=2 unready=0 registered=2 cloudProviderTarget=2 (minSize=1, maxSize=2))
"""
    found = read_autoscalers(_cluster(None, text), _is_allowed).groups
    assert [(group.name, group.nodes, group.max_nodes) for group in found] == [
        ("gke-c-gpus-0a1b-grp", 1, 5),
        ("gke-c-cpus-2c3d-grp", 2, 2),
    ]


def test_an_autoscaler_status_without_read_permission_is_not_requested() -> None:
    def get(path: str, **_: str) -> dict[str, Any]:
        assert "configmaps" not in path
        raise ApiRefusedError(404, "not found")

    def may(*_: str, **__: str) -> bool:
        return False

    assert not _grown(get, may=may).possible
    grown = _grown(get, "gcp", may=may)
    assert grown.possible  # nobody is stopped by what is not known
    assert (
        "a node group may add them: this login may not read kube-system/cluster-autoscaler-status"
        in grown.why
    )
    assert grown.command.startswith("gcloud container node-pools list")
