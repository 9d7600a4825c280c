"""Whether nodes that are not there yet could come: Karpenter's NodePools, and node groups of clouds."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.hardware.cluster_api import ApiRefusedError
from estimator.hardware.cluster_pools import could_grow, refusal
from tests.decorators.backends.plans import planned

REQUEST = planned("llama-70b", "full", "H100", 2).request  # p5.48xlarge


def _pool(*requirements: tuple[str, str, list[str]], **spec: Any) -> dict[str, Any]:
    listed = [{"key": key, "operator": operator, "values": values} for key, operator, values in requirements]
    return {"metadata": {"name": "gpus"}, "spec": {"template": {"spec": {"requirements": listed}}, **spec}}


@pytest.mark.parametrize(
    "requirement",
    [
        ("node.kubernetes.io/instance-type", "In", ["p4d.24xlarge", "p5.48xlarge"]),
        ("karpenter.k8s.aws/instance-family", "In", ["p5"]),
        ("karpenter.k8s.aws/instance-category", "In", ["p", "g"]),
        ("karpenter.k8s.aws/instance-gpu-name", "In", ["h100"]),
        ("karpenter.k8s.aws/instance-gpu-count", "Gt", ["0"]),
        ("karpenter.k8s.aws/instance-gpu-count", "Exists", []),
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
    ],
)
def test_a_node_pool_that_does_not_is_named_with_its_rule(requirement: Any, why: str) -> None:
    assert why in (refusal(_pool(requirement), REQUEST) or "")


def test_a_node_pools_limit_counts() -> None:
    assert refusal(_pool(limits={"nvidia.com/gpu": 8}), REQUEST) == "its limit is 8 GPUs, 16 are needed"
    assert refusal(_pool(limits={"nvidia.com/gpu": 16}), REQUEST) is None


def _cluster(pools: list[dict[str, Any]] | None, status: str | None = None) -> Any:
    def get(path: str, **query: str) -> dict[str, Any]:
        if path.endswith("/kube-system/configmaps/cluster-autoscaler-status") and status is not None:
            return {"data": {"status": status}}
        if pools is None:
            raise ApiRefusedError(404, "not found")
        if path == "/apis/karpenter.sh":
            return {"preferredVersion": {"groupVersion": "karpenter.sh/v1"}}
        assert path == "/apis/karpenter.sh/v1/nodepools"
        return {"items": pools}

    return get


def _may(verb: str, resource: str, **where: str) -> bool:
    return (verb, resource, where) == (
        "get",
        "configmaps",
        {"namespace": "kube-system", "name": "cluster-autoscaler-status"},
    )


def test_a_cloud_without_karpenter_may_have_a_node_group_that_grows() -> None:
    grown = could_grow(_cluster(None), _may, REQUEST, frozenset({"gce"}))
    assert grown.possible
    assert grown.command.startswith("gcloud container node-pools list")


def test_on_premises_nothing_grows() -> None:
    assert not could_grow(_cluster(None), _may, REQUEST, frozenset()).possible


def test_node_pools_that_all_refuse_are_the_answer() -> None:
    pools = [_pool(("kubernetes.io/arch", "In", ["arm64"]))]
    grown = could_grow(_cluster(pools), _may, REQUEST, frozenset({"aws"}))
    assert not grown.possible
    assert "gpus: kubernetes.io/arch In arm64" in grown.why
    assert could_grow(_cluster([*pools, _pool()]), _may, REQUEST, frozenset()).why.endswith("may add them")


# As cluster autoscalers since 1.30 write it; a target of 0 is left out
GROUPS = """
autoscalerStatus: Running
nodeGroups:
- name: https://www.googleapis.com/compute/v1/projects/p/zones/z/instanceGroups/gke-gpus-grp
  health: {{status: Healthy, minSize: 0, maxSize: {most}}}
- name: cpus
  health: {{status: Healthy, cloudProviderTarget: 3, minSize: 1, maxSize: 3}}
"""


def test_the_cluster_autoscaler_says_which_group_could_grow() -> None:
    grown = could_grow(_cluster(None, GROUPS.format(most=4)), _may, REQUEST, frozenset())
    assert grown.possible  # on premises too
    assert grown.why == "the cluster autoscaler may add nodes to gke-gpus-grp (0 of 4 nodes)"


def test_groups_of_their_largest_size_are_told_but_a_cloud_may_have_others() -> None:
    full = _cluster(None, GROUPS.format(most=0))
    assert not could_grow(full, _may, REQUEST, frozenset()).possible
    grown = could_grow(full, _may, REQUEST, frozenset({"gce"}))
    assert grown.possible
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
def test_a_status_that_can_not_be_read_says_nothing(status: str | None) -> None:
    assert not could_grow(_cluster(None, status), _may, REQUEST, frozenset()).possible
    assert (
        could_grow(_cluster(None, status), _may, REQUEST, frozenset({"aws"})).why
        == "a node group may add them"
    )


def test_a_status_that_this_login_may_not_read_is_not_asked_for() -> None:
    def get(path: str, **_: str) -> dict[str, Any]:
        assert "configmaps" not in path
        raise ApiRefusedError(404, "not found")

    assert not could_grow(get, lambda *_, **__: False, REQUEST, frozenset()).possible
