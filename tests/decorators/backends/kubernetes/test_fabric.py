"""The fabric of pods by what nodes offer, and the fields that it adds to pods."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest

from decorators.backends import tables
from decorators.backends.interface import ClusterFacts, Network, StepRequest
from decorators.backends.kubernetes.fabric import (
    GKE_INTERFACES,
    MULTUS,
    describe_unused,
    fabric_of,
    unused_devices,
)
from decorators.backends.kubernetes.request import values_for
from decorators.backends.options import Options
from decorators.backends.strategic_merge import merge
from estimator.errors import UserError
from estimator.plan import Request
from tests.decorators.backends.plans import planned

TWO = planned("llama-70b", "full", "H100", 2).request
GPUS = ("nvidia.com/gpu", 8)
INFINIBAND = ClusterFacts(
    devices=(GPUS, ("rdma/hca_shared_devices_a", 63), ("rdma/hca_shared_devices_b", 63))
)
ROCE = ClusterFacts(
    devices=(GPUS, ("nvidia.com/sriov_rdma", 8)),
    networks=(Network(name="rail", resource="nvidia.com/sriov_rdma", plugin="sriov"),),
)
AKS = ClusterFacts(devices=(GPUS, ("nvidia.com/mlnxnics", 8)))
RAILS = ClusterFacts(  # NVIDIA's network operator with SR-IOV: a resource and a network for each rail
    devices=(GPUS, *((f"nvidia.com/resibp{number}", 1) for number in range(8))),
    networks=tuple(
        Network(name=f"rail-{number}", resource=f"nvidia.com/resibp{number}", plugin="ib-sriov")
        for number in range(8)
    ),
)
EFA = ClusterFacts(devices=(GPUS, ("vpc.amazonaws.com/efa", 32)), efa=32)
A3_HIGH = ClusterFacts(
    labels=(("node.kubernetes.io/instance-type", "a3-highgpu-8g"),),
    devices=(GPUS, *((f"networking.gke.io.networks/vpc{number}", 1) for number in range(1, 5))),
)
A3_MEGA = ClusterFacts(
    labels=(("node.kubernetes.io/instance-type", "a3-megagpu-8g"),),
    devices=(GPUS, *((f"networking.gke.io.networks/vpc{number}", 1) for number in range(1, 9))),
)
A3_ULTRA = ClusterFacts(
    devices=(GPUS, *((f"networking.gke.io.networks/rdma-{number}", 1) for number in range(8)))
)


def pod_of(facts: ClusterFacts, request: Request = TWO, *, on_fabric: bool = True, **options: Any) -> Any:
    """Return (extended resources, container variables, patched pod template) of the pods of a step."""
    values = values_for(
        StepRequest(
            backend="kubernetes",
            request=request,
            facts=facts,
            options=Options(**options),
            on_fabric=on_fabric,
        )
    )
    template: dict[str, Any] = {"metadata": {}, "spec": {"containers": [{"name": "main", "image": "i"}]}}
    for patch in values.pod_patches:
        template = merge(template, patch)
    template["metadata"]["name"] = "p"
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, "1.32", strict=True)
    container = template["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container.get("env", ())} | values.environment
    return values.compute.get("extended_resources", {}), variables, template


@pytest.mark.parametrize(
    ("facts", "name", "resources"),
    [
        (EFA, "efa", {"vpc.amazonaws.com/efa": "32"}),
        (INFINIBAND, "infiniband", {"rdma/hca_shared_devices_a": "1", "rdma/hca_shared_devices_b": "1"}),
        (ROCE, "roce", {"nvidia.com/sriov_rdma": "8"}),
        (AKS, "infiniband", {"nvidia.com/mlnxnics": "8"}),
        (RAILS, "infiniband", {f"nvidia.com/resibp{number}": "1" for number in range(8)}),
        (A3_HIGH, "tcpx", {}),
        (A3_MEGA, "tcpxo", {}),
        (ClusterFacts(efa=0, devices=(GPUS,)), None, {}),
        # of no network of the namespace
        (ClusterFacts(efa=0, devices=(GPUS, ("nvidia.com/sriov_rdma", 8))), None, {}),
    ],
)
def test_the_automatic_fabric_is_the_one_that_the_nodes_offer(
    facts: ClusterFacts, name: str | None, resources: dict[str, str]
) -> None:
    used = fabric_of(TWO, Options(), facts)
    assert (used.name if used else None) == name
    fabric, variables, _ = pod_of(facts)
    assert {key: value for key, value in fabric.items() if not key.startswith("hugepages")} == resources
    assert ("FI_PROVIDER" in variables) == (name == "efa")
    if used is not None and name != "efa":
        assert pod_of(facts, fabric=name) == pod_of(facts), "asked for by its name it is the same"


def test_each_rail_gets_its_own_network() -> None:
    networks = pod_of(RAILS)[2]["metadata"]["annotations"][MULTUS]
    assert networks == ",".join(f"rail-{number}" for number in range(8))


def test_unused_network_devices_are_named() -> None:
    other_devices = (GPUS, ("nvidia.com/mig-1g.10gb", 7), ("hugepages-2Mi/x", 1), ("squat.ai/fuse", 5))
    alone = ClusterFacts(devices=(*other_devices, ("nvidia.com/resibp0", 1), ("nvidia.com/sriov-rdma-vf", 8)))
    assert fabric_of(TWO, Options(), alone) is None
    assert unused_devices(alone) == ("nvidia.com/resibp0", "nvidia.com/sriov-rdma-vf")
    assert "nvidia.com/sriov-rdma-vf" in describe_unused(unused_devices(alone))[0]
    assert unused_devices(ClusterFacts(devices=other_devices)) == ()


@pytest.mark.parametrize("facts", [INFINIBAND, ROCE, AKS])
def test_a_verbs_fabric_pins_memory_and_fails_if_it_is_unusable(facts: ClusterFacts) -> None:
    _, variables, template = pod_of(facts)
    assert template["spec"]["containers"][0]["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert variables["NCCL_NET"] == "IB"


def test_a_multus_network_is_attached_once_per_device() -> None:
    assert pod_of(ROCE)[2]["metadata"]["annotations"] == {MULTUS: ",".join(["rail"] * 8)}
    assert "annotations" not in pod_of(INFINIBAND)[2]["metadata"]


def test_gke_networks_become_interfaces_and_tcpx_adds_its_sidecar() -> None:
    _, variables, template = pod_of(A3_HIGH)
    interfaces = json.loads(template["metadata"]["annotations"][GKE_INTERFACES])
    names = [each["interfaceName"] for each in interfaces]
    assert names == ["eth0", *variables["NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"].split(",")]
    assert [each["network"] for each in interfaces] == ["default", "vpc1", "vpc2", "vpc3", "vpc4"]
    (daemon,) = template["spec"]["initContainers"]
    assert daemon["restartPolicy"] == "Always"
    sockets = {mount["mountPath"] for mount in daemon["volumeMounts"]}
    assert variables["NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX"] in sockets
    _, variables, template = pod_of(A3_MEGA)
    assert len(json.loads(template["metadata"]["annotations"][GKE_INTERFACES])) == 9
    assert template["spec"]["initContainers"][0]["restartPolicy"] == "Always"
    assert variables["NCCL_NET"] == "FasTrak"
    rdma = json.loads(pod_of(A3_ULTRA)[2]["metadata"]["annotations"][GKE_INTERFACES])
    assert (rdma[1], len(rdma)) == ({"interfaceName": "eth2", "network": "rdma-0"}, 9)


@pytest.mark.parametrize("facts", [EFA, INFINIBAND, ROCE, A3_HIGH])
def test_steps_without_a_fabric_or_with_one_node_add_nothing_to_the_pod(facts: ClusterFacts) -> None:
    one = planned("llama-8b", "lora", "H100", 1).request
    nothing = ({}, {}, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main", "image": "i"}]}})
    assert pod_of(facts, one, on_fabric=False) == nothing
    assert pod_of(facts, one, termination_grace_s=0) == nothing
    assert pod_of(facts, fabric="none", termination_grace_s=0) == nothing


def test_a_fabric_that_the_nodes_do_not_offer_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        fabric_of(TWO, Options(fabric="infiniband"), EFA)
    assert "the nodes offer no rdma/*" in str(refused.value)
    assert "vpc.amazonaws.com/efa" in str(refused.value)


def test_the_pod_patch_of_the_user_is_applied_last() -> None:
    user_patch = {
        "metadata": {"annotations": {"team": "a"}},
        "spec": {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 300,
            "containers": [{"name": "main", "env": [{"name": "NCCL_NET", "value": "Socket"}]}],
        },
    }
    _, variables, template = pod_of(ROCE, pod_template=user_patch)
    assert variables["NCCL_NET"] == "Socket"
    assert set(template["metadata"]["annotations"]) == {MULTUS, "team"}
    assert template["spec"]["hostNetwork"] is True
    assert template["spec"]["terminationGracePeriodSeconds"] == 300
    assert "preStop" in template["spec"]["containers"][0]["lifecycle"]


def test_fabric_rows_have_sources_and_patterns_for_shared_resources_come_last() -> None:
    """A pattern that matches everything would hide later rows."""
    rows = tables.pod_fabrics()
    assert all(row.source for row in rows)
    assert {row.fabric for row in rows} == {"efa", "roce", "tcpx", "tcpxo", "infiniband"}
    rdma, tcpx = (
        next(i for i, row in enumerate(rows) if row.resource.endswith(e)) for e in ("rdma-*", "networks/*")
    )
    assert rdma < tcpx
