"""Two slow virtual machines of one physical host give a warning that names both, not two faulty nodes."""

from __future__ import annotations

import dataclasses

from checklist.measurements import Measurements
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, verdict_of, with_pairs


def slow(*nodes: int, hosts: dict[int, str]) -> Result:
    run = cpu_run(8)
    facts = tuple(dataclasses.replace(fact, physical_host=hosts.get(fact.node)) for fact in run.facts)
    placed: Measurements = dataclasses.replace(run, facts=facts)
    sides = dict.fromkeys(nodes, 0.5)
    return judge(with_pairs(placed, Cluster(nodes=8, transmit=sides, receive=sides)))


def test_two_slow_virtual_machines_of_one_host_give_a_warning_that_names_both() -> None:
    result = slow(2, 5, hosts={2: "a", 5: "a", 6: "b"})
    assert result.bad_nodes == ()
    assert verdict_of(result, "pairs") == "WARN"
    titles = {fault.suspects: fault.title for fault in result.findings}
    assert titles["host-2",].endswith("It shares its physical host with host-5.")


def test_a_slow_node_fails_if_it_is_alone_on_its_host_or_the_host_is_unknown() -> None:
    assert slow(2, hosts={2: "a", 5: "a"}).bad_nodes == ("host-2",)
    assert slow(2, 5, hosts={}).bad_nodes == ("host-2", "host-5")


def test_the_placement_names_virtual_machines_of_one_host() -> None:
    placement = slow(hosts={2: "a", 5: "a", 6: "b"}).check("placement")
    assert placement is not None
    assert "Virtual machines of one physical host: host-2, host-5." in placement.reason
    assert "host-6" not in placement.reason
