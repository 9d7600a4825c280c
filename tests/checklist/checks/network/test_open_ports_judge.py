"""Judging of blocked port ranges and address families."""

from __future__ import annotations

import dataclasses

import pytest

from checklist.checks.network.open_ports_judge import spans
from checklist.measurements import Measurements, OpenPorts
from checklist.result import Finding
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, mesh, opened, verdict_of, with_facts

TRIED = opened(2)[0].tried
UPPER = TRIED[8:]
WAYS = [(one.src, one.dst) for one in opened(4)]


def with_blocked(ways: list[tuple[int, int]], ports: tuple[int, ...] = UPPER, nodes: int = 4) -> Measurements:
    return dataclasses.replace(gpu_run(nodes), open_ports=opened(nodes, dict.fromkeys(ways, ports)))


def findings(run: Measurements) -> list[Finding]:
    return [fault for fault in judge(run).findings if fault.check == "open-ports"]


def test_a_port_range_half_blocked_into_a_node_is_named_with_the_ports() -> None:
    (fault,) = findings(with_blocked([way for way in WAYS if way[1] == 2]))
    assert fault.title == (
        "Into host-2 these ports are blocked: about 46881 to 60999 (8 of 16 tried of 32768 to 60999)."
    )
    assert (fault.verdict, fault.nodes) == ("FAIL", ("host-2",))


def test_ports_blocked_from_a_node_to_all_others_are_attributed_to_the_node() -> None:
    (fault,) = findings(with_blocked([way for way in WAYS if way[0] == 1]))
    assert fault.title.startswith("Out of host-1 these ports are blocked: about 46881 to 60999")


def test_both_nodes_are_suspects_if_one_direction_is_blocked() -> None:
    (fault,) = findings(with_blocked([(2, 1)]))
    assert (fault.nodes, fault.suspects) == ((), ("host-1", "host-2"))
    assert fault.title.startswith("From host-2 to host-1 these ports")
    (fault,) = findings(with_blocked([(0, 1)], nodes=2))
    assert fault.suspects == ("host-0", "host-1")


def test_ports_blocked_between_all_nodes_are_one_finding_without_a_node() -> None:
    (fault,) = findings(with_blocked(WAYS))
    assert fault.title.startswith("Between all nodes these ports are blocked")
    assert judge(with_blocked(WAYS)).bad_nodes == ()


def test_an_unreachable_node_is_reported_by_the_mesh_check_only() -> None:
    ways = [way for way in WAYS if way[1] == 2]
    run = dataclasses.replace(with_blocked(ways, TRIED), probes=mesh(4, cut=tuple((n, 2) for n in (0, 1, 3))))
    assert [fault.check for fault in judge(run).findings] == ["mesh"]


def test_ports_that_were_not_tried_give_no_verdict() -> None:
    result = judge(dataclasses.replace(gpu_run(4), open_ports=()))
    assert verdict_of(result, "open-ports") == "NO-VERDICT"
    some = tuple(one for one in opened(4) if one.dst != 3)
    assert verdict_of(judge(dataclasses.replace(gpu_run(4), open_ports=some)), "open-ports") == "NO-VERDICT"


@pytest.mark.parametrize(
    ("places", "reported"),
    [
        ((0,), [(32_768, 34_532)]),
        ((15,), [(59_229, 60_999)]),
        ((3, 4, 9), [(38_061, 41_588), (48_645, 50_408)]),
    ],
)
def test_a_blocked_range_extends_half_way_to_the_next_open_port(
    places: tuple[int, ...], reported: list[tuple[int, int]]
) -> None:
    one = dataclasses.replace(opened(2)[0], blocked=tuple(TRIED[place] for place in places))
    assert spans(one) == reported


def over_ipv6(way: tuple[int, int], *, blocked: bool) -> OpenPorts:
    tried = (46_000,)
    return OpenPorts(
        src=way[0],
        dst=way[1],
        address=f"fd77::{way[1] + 1}",
        other_family=True,
        low=32_768,
        high=60_999,
        tried=tried,
        blocked=tried if blocked else (),
    )


def with_ipv6(closed: list[tuple[int, int]], run: Measurements | None = None) -> Measurements:
    run = gpu_run(4) if run is None else run
    other = tuple(over_ipv6(way, blocked=way in closed) for way in WAYS)
    return dataclasses.replace(run, open_ports=(*run.open_ports, *other))


def test_a_node_reachable_over_one_address_family_only_gives_a_warning() -> None:
    assert findings(with_ipv6([])) == []
    (fault,) = findings(with_ipv6([way for way in WAYS if way[1] == 2]))
    assert (fault.verdict, fault.title) == ("WARN", "host-2 is not reached over IPv6, only over IPv4.")
    (fault,) = findings(with_ipv6([way for way in WAYS if way[0] == 1]))
    assert fault.title == "host-1 reaches no other node over IPv6, only over IPv4."


def test_an_unreachable_address_family_gives_a_warning_only_if_a_name_resolves_to_it() -> None:
    assert findings(with_ipv6(WAYS)) == []
    check = judge(with_ipv6(WAYS)).check("open-ports")
    assert check.reason.endswith("Over IPv6 no node is reached, and nothing uses it.")
    named = with_facts(gpu_run(4), 8, hostname_address="fd77::2")
    (fault,) = findings(with_ipv6(WAYS, named))
    assert fault.title == "host-0, host-1, host-2, host-3 are not reached over IPv6, only over IPv4."


def test_a_blocked_address_family_of_the_run_fails_and_names_the_working_one() -> None:
    run = with_blocked([way for way in WAYS if way[1] == 2], TRIED)
    (fault,) = findings(with_ipv6([], run))
    assert (fault.verdict, fault.title) == ("FAIL", "host-2 is not reached over IPv4, only over IPv6.")
