"""Values of @kubernetes, @resources and the environment for a plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from decorators.backends.interface import ClusterFacts, StepRequest, StepValues
from decorators.backends.kubernetes.request import lowered, values_for
from decorators.backends.options import Options
from decorators.backends.overrides import request_for
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.cluster import tables
from estimator.hardware.cluster.nodes import INSTANCE_TYPE, ZONE
from estimator.hardware.cluster.tables import PodResources
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import GIB, MIB, Override, Request
from tests.decorators.backends.plans import CASES, EFA_VARIABLES, planned

EFA = {"p5.48xlarge": 32, "p5e.48xlarge": 32, "p5en.48xlarge": 16, "p4d.24xlarge": 4, "p4de.24xlarge": 4}


def _values(request: Request, **fields: Any) -> StepValues:
    return values_for(StepRequest(backend="kubernetes", request=request, **fields))


def _lowered(request: Request, **fields: Any) -> tuple[Override, ...]:
    return lowered(StepRequest(backend="kubernetes", request=request, **fields))


@pytest.mark.parametrize(("model", "method", "gpu", "nodes"), CASES)
def test_every_field_of_a_plan_is_requested(model: str, method: str, gpu: str, nodes: int) -> None:
    planned_run = planned(model, method, gpu, nodes)
    request = planned_run.request
    values = _values(request)
    machine = hardware.instance(request.instance_type or "")

    assert set(values.resources) == {"cpu", "memory", "disk", "shared_memory", "gpu"}
    assert values.resources["gpu"] == request.gpus_per_node
    assert values.resources["shared_memory"] == request.shared_memory_mib
    assert values.resources["disk"] == math.ceil(request.disk_mib * MIB / 1e6)
    # Enough for the job, no more than planned, and less than the machine has
    assert planned_run.layout.processes_per_node <= values.resources["cpu"] <= request.cpu < machine.vcpu
    memory = values.resources["memory"] * 10**6
    assert planned_run.prediction.memory.host_bytes <= memory < 0.95 * machine.ram_bytes
    assert memory <= request.memory_mib * MIB + 10**6

    assert {k: values.compute[k] for k in ("cpu", "memory", "disk")} == {
        k: values.resources[k] for k in ("cpu", "memory", "disk")
    }
    assert values.compute["node_selector"] == {INSTANCE_TYPE: request.instance_type}
    assert values.compute["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    interfaces = EFA.get(machine.name, 0) if nodes > 1 else 0
    assert values.compute.get("extended_resources") == (
        {"vpc.amazonaws.com/efa": str(interfaces)} if interfaces else None
    )
    assert values.environment == (EFA_VARIABLES if interfaces else {})
    assert "labels" not in values.compute


def test_a_machine_of_another_cloud_gets_no_efa() -> None:
    request = planned("llama-70b", "full", "H100", 4, cloud="gcp").request
    values = _values(request)
    assert "extended_resources" not in values.compute
    assert values.environment == {}


def test_a_part_of_a_machine_gets_no_efa_interface() -> None:
    request = dataclasses.replace(planned("llama-70b", "full", "H100", 4).request, gpus_per_node=4)
    assert "extended_resources" not in _values(request).compute


def test_queue_priority_zone_and_labels_of_the_request_are_passed_on() -> None:
    request = dataclasses.replace(
        planned("llama-70b", "full", "H100", 4).request, node_labels=(("training-checklist/fit", "true"),)
    )
    options = Options(
        queues=(("H100", "h100-queue"), ("A10G", "other")), priority="research", zone="us-east-1b"
    )
    values = _values(request, options=options).compute
    assert values["labels"] == {
        "kueue.x-k8s.io/queue-name": "h100-queue",
        "kueue.x-k8s.io/priority-class": "research",
    }
    assert values["node_selector"] == {
        INSTANCE_TYPE: request.instance_type,
        ZONE: "us-east-1b",
        "training-checklist/fit": "true",
    }


def test_facts_of_the_cluster_take_precedence_over_the_tables() -> None:
    request = planned("llama-70b", "full", "H100", 4).request
    facts = ClusterFacts(
        labels=(("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"),),
        tolerations=(Toleration(key="sku", value="gpu", effect="NoSchedule"),),
        pod_capacity=PodResources(cpu=20.6, memory_bytes=100 * GIB),
        efa=8,
        hugepages_bytes=10 * GIB,
        zone="rack-3",
    )
    values = _values(request, facts=facts)
    assert (values.resources["cpu"], values.resources["memory"]) == (20, 100 * GIB // 10**6)
    assert values.compute["node_selector"] == {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        ZONE: "rack-3",
    }
    assert values.compute["tolerations"] == [
        {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
    ]
    assert values.compute["extended_resources"] == {"vpc.amazonaws.com/efa": "8", "hugepages-2Mi": "5120Mi"}


def test_a_step_without_gpus_is_not_restricted_to_the_training_machines() -> None:
    """A taint keeps steps without GPUs off those nodes."""
    taint = Toleration(key="nvidia.com/gpu", effect="NoSchedule")
    facts = ClusterFacts(labels=((INSTANCE_TYPE, "p5.48xlarge"),), tolerations=(taint,))
    data = request_for(planned("llama-70b", "full", "H100", 2), "data")
    values = _values(data, facts=facts).compute
    assert "node_selector" not in values
    assert "tolerations" not in values


@pytest.mark.parametrize(("nodes", "efa"), [(1, 0), (1, 32), (2, 0), (2, 32)])
def test_efa_variables_are_set_only_for_several_nodes_with_efa_interfaces(nodes: int, efa: int) -> None:
    request = dataclasses.replace(planned("llama-70b", "full", "H100", 2).request, nodes=nodes)
    values = _values(request, facts=ClusterFacts(efa=efa))
    assert values.environment == (EFA_VARIABLES if nodes > 1 and efa else {})


def test_requests_reduced_to_a_nodes_free_resources_are_noted() -> None:
    request = planned("llama-70b", "full", "H100", 4).request
    pod_capacity = PodResources(cpu=20.6, memory_bytes=100 * GIB)
    by = "allocatable on a node of this cluster"
    assert _lowered(request, facts=ClusterFacts(pod_capacity=pod_capacity)) == (
        Override(name="cpu", planned=str(request.cpu), used="20", given_by=by),
        Override(name="memory_mib", planned=str(request.memory_mib), used=str(100 * 1024), given_by=by),
    )
    assert _lowered(request) == ()
    small = planned("llama-8b", "lora", "L40S", 1).request  # g6e.2xlarge: 64 GiB, of which the table keeps 10
    assert _lowered(small) == (), "a plan asks for what it needs"
    [note] = _lowered(dataclasses.replace(small, memory_mib=60 * 1024))
    assert (note.name, note.given_by) == ("memory_mib", "allocatable on this machine type")


def test_metaflow_configuration_of_all_steps_is_kept() -> None:
    configured = {
        "node_selector": {"team": "ml"},
        "tolerations": [{"key": "ours", "operator": "Exists"}],
        "labels": {"cost": "7"},
        "extended_resources": {"example.com/fpga": "1"},
    }
    request = planned("llama-70b", "full", "H100", 4).request
    values = _values(request, configured=configured, options=Options(queue="q")).compute
    assert values["node_selector"]["team"] == "ml"
    assert {"key": "ours", "operator": "Exists"} in values["tolerations"]
    assert len(values["tolerations"]) == 2
    assert (values["labels"]["cost"], values["extended_resources"]["example.com/fpga"]) == ("7", "1")


def test_an_on_premises_machine_is_not_selected_by_instance_type() -> None:
    request = Request(
        nodes=1,
        gpus_per_node=1,
        gpu_type="T4",
        cpu=4,
        memory_mib=8192,
        shared_memory_mib=0,
        disk_mib=1024,
        instance_type="n1-standard-8 + 1x T4",
    )
    values = _values(request)
    assert "node_selector" not in values.compute
    assert values.resources["shared_memory"] is None


@pytest.mark.parametrize(
    ("cloud", "label", "taint"),
    [
        ("aws", ("karpenter.sh/capacity-type", "spot"), None),
        ("gcp", ("cloud.google.com/gke-spot", "true"), "cloud.google.com/gke-spot"),
        ("azure", ("kubernetes.azure.com/scalesetpriority", "spot"), "kubernetes.azure.com/scalesetpriority"),
    ],
)
def test_spot_nodes_are_selected_by_label_and_their_taint_is_tolerated(
    cloud: str, label: tuple[str, str], taint: str | None
) -> None:
    request = dataclasses.replace(planned("llama-70b", "full", "H100", 2).request, cloud=cloud, spot=True)
    values = _values(request).compute
    assert values["node_selector"][label[0]] == label[1]
    assert taint in (None, *(item["key"] for item in values["tolerations"]))
    plain = _values(dataclasses.replace(request, spot=False)).compute
    assert label[0] not in plain["node_selector"]
    assert taint not in [item["key"] for item in plain["tolerations"]]


def test_spot_labels_of_the_cluster_take_precedence_over_its_cloud_and_are_required() -> None:
    request = dataclasses.replace(planned("llama-70b", "full", "H100", 2).request, spot=True)
    managed = next(row for row in tables.spot_labels() if "EKS" in row.manager)
    values = _values(request, facts=ClusterFacts(spot=managed)).compute
    assert values["node_selector"]["eks.amazonaws.com/capacityType"] == "SPOT"
    assert "karpenter.sh/capacity-type" not in values["node_selector"]
    with pytest.raises(UserError, match="The label of spot nodes of"):
        _values(dataclasses.replace(request, cloud="cluster"))


def test_kueue_keeps_only_the_training_pods_together() -> None:
    request = planned("llama-70b", "lora", "h100-sxm", 2).request
    facts = ClusterFacts(near="cloud/rack")
    patches = _values(request, facts=facts, on_fabric=True).pod_patches
    assert {"metadata": {"annotations": NEAR}} in patches
    assert _values(request, facts=facts).pod_patches == ()
    assert "kueue" not in str(_values(request, on_fabric=True).pod_patches)


NEAR = {"kueue.x-k8s.io/podset-preferred-topology": "cloud/rack", "kueue.x-k8s.io/podset-group-name": "nodes"}
