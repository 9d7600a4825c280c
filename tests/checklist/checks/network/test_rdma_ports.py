"""RDMA ports that are down or slow are named with their node."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist import measurements
from checklist.condensed import condensed_run
from checklist.measurements import Measurements, RdmaPort
from checklist.verdict import judge
from tests.checklist.runs import all_with, gpu_run, with_facts

UP = tuple(
    RdmaPort(
        name=f"mlx5_{number}/1",
        model="MT_0000000838",
        state="ACTIVE",
        physical="LinkUp",
        gbps=400.0,
        layer="InfiniBand",
    )
    for number in range(4)
)
# For storage, of the same board: its second port has no cable anywhere
STORAGE = (
    dataclasses.replace(UP[0], name="mlx5_8/1", gbps=200.0, layer="Ethernet"),
    dataclasses.replace(UP[0], name="mlx5_9/1", state="DOWN", physical="Disabled", gbps=10.0),
)
DOWN = {"state": "DOWN", "physical": "Polling", "gbps": 10.0}


def cluster(nodes: int, *bad: int, **changes: Any) -> Measurements:
    """Return equal nodes, with changed ports on some of them."""
    run = gpu_run(nodes)
    for node in range(nodes):
        ports = (*UP, *STORAGE)
        if node in bad:
            ports = (ports[0], dataclasses.replace(ports[1], **changes), *ports[2:])
        run = with_facts(run, 8 * node, rdma_ports=ports)
    return run


def reported_faults(run: Measurements) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (fault.code, fault.verdict, fault.nodes) for fault in judge(run).findings if fault.check == "rdma"
    ]


@pytest.mark.parametrize(
    ("nodes", "changes", "reported"),
    [
        (3, DOWN, ("rdma-port-down", "FAIL")),
        (3, {"state": "INIT"}, ("rdma-port-down", "FAIL")),
        (3, {"gbps": 200.0}, ("rdma-port-slow", "FAIL")),
        (2, {"gbps": 200.0}, ("rdma-port-slow", "WARN")),
        (2, DOWN, ("rdma-port-down", "WARN")),
        (1, DOWN, ("rdma-port-down", "WARN")),
    ],
)
def test_a_port_that_differs_from_its_peers_is_named(
    nodes: int, changes: dict[str, Any], reported: tuple[str, str]
) -> None:
    run = cluster(nodes, nodes - 1, **changes)
    assert reported_faults(run) == [(*reported, (f"host-{nodes - 1}",))]
    (title,) = (fault.title for fault in judge(run).findings if fault.check == "rdma")
    assert "mlx5_1/1" in title


def test_ports_equal_on_all_nodes_give_no_finding() -> None:
    run = cluster(4)
    assert reported_faults(run) == []
    check = judge(run).check("rdma")
    assert (check.verdict, check.reason) == (
        "PASS",
        "32 EFA devices on each node, ports at 200 and 400 Gbit/s.",
    )
    assert reported_faults(cluster(4, 0, 1, 2, 3, **DOWN)) == [], "an unused port"


def test_ports_are_compared_with_the_majority_of_nodes() -> None:
    assert reported_faults(cluster(4, 0, gbps=800.0)) == [], "one that is faster makes no other slow"
    assert reported_faults(cluster(5, 0, 1, **DOWN)) == [
        ("rdma-port-down", "FAIL", (f"host-{n}",)) for n in (0, 1)
    ]


def test_an_impossible_port_rate_is_not_used_as_a_reference() -> None:
    run = cluster(3, 1, gbps=float("inf"))
    assert [(fault.code, fault.suspects) for fault in judge(run).findings] == [("bad-figure", ("host-1",))]


def test_ports_survive_json_and_large_results_keep_differing_ports() -> None:
    run = cluster(3, 1, **DOWN)
    assert measurements.from_json(measurements.to_json(run)) == run
    large = condensed_run(cluster(130, 7, **DOWN))
    nodes_with_ports = [fact.node for fact in large.facts if fact.rdma_ports]
    assert nodes_with_ports == [0, 7]


@pytest.mark.parametrize(("gbps", "expected"), [(200.0, [("rdma-below-machine", "WARN", ())]), (400.0, [])])
def test_ports_slower_than_the_machine_type_on_all_nodes_are_one_finding(
    gbps: float, expected: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    ports = tuple(dataclasses.replace(port, gbps=gbps) for port in UP)
    run = all_with(
        gpu_run(3), instance_type="Standard_ND96isr_H100_v5", efa_devices=0, ib_devices=("mlx5_0",)
    )
    assert reported_faults(all_with(run, rdma_ports=ports)) == expected
