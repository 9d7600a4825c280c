"""Selection of nodes that can run a request, and the reasons why others cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from decorators.backends.interface import MinimumRequest
from decorators.backends.kubernetes.fit import Fit, fit
from estimator.hardware.cluster.nodes import INSTANCE_TYPE
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.tables import PodResources
from estimator.hardware.cluster.taints import Toleration, tolerated
from estimator.plan import GIB, Request
from tests.decorators.backends.plans import node, planned

LEAST = MinimumRequest(cpu=8, memory_bytes=500 * GIB)


def _request(**changes: Any) -> Request:
    return dataclasses.replace(planned("llama-70b", "full", "H100", 2).request, **changes)


def _fit(*nodes: Any, rules: PodRules | None = None, **changes: Any) -> Fit:
    return fit(nodes, _request(**changes), rules or PodRules(), LEAST)


def test_the_planned_machine_is_found_by_its_type() -> None:
    fit_result = _fit(node("a"), node("b"))
    assert fit_result.names == ("a", "b")
    assert fit_result.facts.labels == ((INSTANCE_TYPE, "p5.48xlarge"),)
    assert (fit_result.facts.zone, fit_result.facts.efa) == ("us-east-1a", 32)


SCHEMES = {
    "gfd": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "karpenter": {
        "karpenter.k8s.aws/instance-gpu-name": "h100",
        "karpenter.k8s.aws/instance-gpu-memory": "81920",
    },
    "gke": {"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_machine_with_the_gpu_is_found_by_the_clusters_own_labels(scheme: str) -> None:
    labels = {"node.kubernetes.io/instance-type": None, "nvidia.com/gpu.product": None, **SCHEMES[scheme]}
    fit_result = _fit(node("a", labels=labels), node("b", labels=labels))
    assert fit_result.names == ("a", "b")
    assert dict(fit_result.facts.labels or ()) == SCHEMES[scheme]


def test_the_node_selector_uses_one_label_that_all_selected_nodes_have() -> None:
    bare = {"node.kubernetes.io/instance-type": None}
    other = {**bare, "nvidia.com/gpu.product": None, **SCHEMES["gke"]}
    fit_result = _fit(node("a", labels=bare), node("b", labels=bare), node("c", labels=other))
    assert fit_result.names == ("a", "b")
    assert dict(fit_result.facts.labels or ()) == SCHEMES["gfd"]


@pytest.mark.parametrize(
    ("why", "labels"),
    [
        ("not Ready", {"ready": False}),
        ("cordoned", {"unschedulable": True}),
        ("with 8 A100 SXM 80GB", {"labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}),
        ("with only 4 of 8 GPUs", {"resources": {"nvidia.com/gpu": "4"}}),
        ("with 3.6 of 8 CPUs", {"resources": {"cpu": "4"}}),
        ("with 63.6 GiB of 500.0 GiB of memory", {"resources": {"memory": "64Gi"}}),
        ("with 20.0 GiB of", {"resources": {"ephemeral-storage": "20Gi"}}),
        ("device plugin", {"resources": {"nvidia.com/gpu": "0"}}),
        (
            "untolerated taint team=b:NoSchedule",
            {"taints": [{"key": "team", "value": "b", "effect": "NoSchedule"}]},
        ),
    ],
)
def test_an_unsuitable_node_is_rejected_with_the_reason(why: str, labels: dict[str, Any]) -> None:
    fit_result = _fit(node("a", **labels))
    assert fit_result.names == ()
    assert why in fit_result.rejections[0][0]


def test_available_resources_are_those_of_the_smallest_node_without_daemon_pods() -> None:
    fit_result = _fit(node("a"), node("b", resources={"memory": "1000Gi"}))
    assert fit_result.facts.pod_capacity.memory_bytes == 1000 * GIB - int(0.4 * GIB)
    assert fit_result.facts.pod_capacity.cpu == pytest.approx(191.05)


def test_measured_daemon_pods_take_precedence_over_the_table() -> None:
    daemons = PodResources(cpu=3.5, memory_bytes=6 * GIB)
    fit_result = fit([node("a")], _request(nodes=1), PodRules(), LEAST, daemons=daemons)
    assert fit_result.facts.pod_capacity == PodResources(cpu=191.45 - 3.5, memory_bytes=1950 * GIB - 6 * GIB)
    largest = PodResources(cpu=190, memory_bytes=0)
    assert fit([node("a")], _request(nodes=1), PodRules(), LEAST, daemons=largest).names == ()


def test_no_zone_is_selected_if_none_has_all_nodes() -> None:
    other = {"topology.kubernetes.io/zone": "us-east-1b"}
    fit_result = _fit(node("a"), node("b", labels=other))
    assert fit_result.facts.zone is None
    assert len(fit_result.names) == 2
    assert _fit(node("a"), node("b", labels=other), rules=PodRules(zone="us-east-1b")).names == ("b",)


def test_nodes_without_a_requested_label_are_ignored() -> None:
    fit_label = (("training-checklist/fit", "true"),)
    good = node("good", labels={"training-checklist/fit": "true"})
    fit_result = _fit(good, node("bad", labels={"training-checklist/fit": "false"}), node_labels=fit_label)
    assert fit_result.names == ("good",)
    assert fit_result.rejections == (("without the label training-checklist/fit=true", 1),)


def test_an_extended_resource_of_the_user_must_exist_on_the_node() -> None:
    rdma = (("rdma/hca", 1.0),)
    nodes = [node("plain"), node("fast", resources={"rdma/hca": "1"})]
    fit_result = fit(nodes, _request(nodes=1), PodRules(), LEAST, extended=rdma)
    assert (fit_result.names, fit_result.rejections) == (("fast",), (("with 0 of 1 rdma/hca", 1),))


@pytest.mark.parametrize(
    ("taint", "expected"),
    [
        ("nvidia.com/gpu:NoSchedule", Toleration(key="nvidia.com/gpu", effect="NoSchedule")),
        ("sku=gpu:NoSchedule", Toleration(key="sku", value="gpu", effect="NoSchedule")),
        ("dedicated=gpu-pool:NoExecute", Toleration(key="dedicated", value="gpu-pool", effect="NoExecute")),
        ("dedicated=team-b:NoSchedule", None),
        ("a.b/accelerator:NoSchedule", Toleration(key="a.b/accelerator", effect="NoSchedule")),
        ("training-checklist/unfit:NoSchedule", None),
    ],
)
def test_only_taints_that_mention_gpus_are_tolerated(taint: str, expected: Toleration | None) -> None:
    assert tolerated(taint) == expected


@pytest.mark.parametrize(
    ("item", "covered"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "operator": "Equal", "value": "b", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "b"}, True),
        ({"key": "team", "value": "c"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_a_taint_tolerated_by_the_user_does_not_exclude_a_node(item: dict[str, str], covered: bool) -> None:
    fenced = node("a", taints=[{"key": "team", "value": "b", "effect": "NoSchedule"}])
    user_tolerations = (Toleration.of(item),)
    assert (
        bool(fit([fenced], _request(nodes=1), PodRules(tolerations=user_tolerations), LEAST).names) is covered
    )


def test_tolerations_of_the_user_replace_those_of_the_table() -> None:
    usual = node("a", taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}])
    user_tolerations = (Toleration(key="team", effect=""),)
    one = _request(nodes=1)
    assert fit([usual], one, PodRules(tolerations=user_tolerations), LEAST).names == ("a",)
    replaced = fit([usual], one, PodRules(tolerations=user_tolerations, tolerate_gpu_taints=False), LEAST)
    assert replaced.rejections == (("untolerated taint nvidia.com/gpu=present:NoSchedule", 1),)


def test_a_step_without_gpus_fits_on_any_node_that_is_large_enough() -> None:
    bare = node("cpu", labels={"nvidia.com/gpu.product": None}, resources={"nvidia.com/gpu": None})
    fit_result = _fit(bare, nodes=1, gpus_per_node=0, gpu_type=None, instance_type=None)
    assert fit_result.names == ("cpu",)
    assert fit_result.facts.labels is None


def test_a_spot_run_uses_only_labeled_spot_nodes_and_the_more_frequent_of_two_labels() -> None:
    karpenter, managed = {"karpenter.sh/capacity-type": "spot"}, {"eks.amazonaws.com/capacityType": "SPOT"}
    nodes = [
        node("k1", labels=karpenter),
        node("k2", labels=karpenter),
        node("m1", labels=managed),
        node("o1", labels={"karpenter.sh/capacity-type": "on-demand"}),
        node("bare"),
    ]
    fit_result = _fit(*nodes, spot=True)
    assert fit_result.names == ("k1", "k2")
    assert (fit_result.facts.spot.label, fit_result.facts.spot.value) == (
        "karpenter.sh/capacity-type",
        "spot",
    )
    assert fit_result.rejections == (("not marked as spot nodes", 2),)
    assert _fit(*nodes).facts.spot is None
