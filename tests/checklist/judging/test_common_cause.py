"""Faulty nodes that share a rack, subnet or NVLink domain are reported with it, and random ones are not."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection

import pytest

from checklist.measurements import Measurements, Nic
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, with_pairs


def rack(node: int) -> dict[str, object]:
    return {"network_nodes": ("spine", f"rack-{node // 4}", f"host-{node}")}


def subnet(node: int) -> dict[str, object]:
    address = f"10.0.{node // 4}.{node + 1}"
    return {"addresses": (address,), "nics": (Nic(name="eth0", addresses=(address,), up=True),)}


def switch(node: int) -> dict[str, object]:
    return {"switches": (f"leaf-{node // 4}",)}


def slow(
    nodes: Collection[int], place: Callable[[int], dict[str, object]], share: float = 0.5, count: int = 16
) -> Measurements:
    run = cpu_run(count)
    facts = [dataclasses.replace(fact, **place(fact.node)) for fact in run.facts]  # type: ignore[arg-type]
    sides = dict.fromkeys(nodes, share)
    placed = dataclasses.replace(run, facts=tuple(facts))
    return with_pairs(placed, Cluster(nodes=count, transmit=sides, receive=sides))


def headline(run: Measurements) -> str:
    return judge(run).headline


@pytest.mark.parametrize(
    ("place", "unit"), [(rack, "rack-1"), (subnet, "subnet 10.0.1.0/24"), (switch, "switch leaf-1")]
)
def test_slow_nodes_of_one_network_unit_are_reported_with_the_unit_first(
    place: Callable[[int], dict[str, object]], unit: str
) -> None:
    result = judge(slow(range(4, 8), place))
    assert result.headline.startswith(
        f"4 of the 4 nodes with findings are among the 4 of {unit}: check its switch, cabling and power "
        "first. host-4 is slow"
    )
    assert result.bad_nodes == ("host-4", "host-5", "host-6", "host-7")


def test_a_faulty_node_elsewhere_does_not_hide_the_common_unit() -> None:
    assert headline(slow([4, 5, 6, 7, 13], rack, count=24)).startswith(
        "4 of the 5 nodes with findings are among the 4"
    )


def test_warnings_count_for_a_common_cause_if_nothing_fails() -> None:
    assert headline(slow(range(4, 8), rack, 0.86)).startswith("4 of the 4 nodes")


@pytest.mark.parametrize(
    ("nodes", "count", "reported"),
    [
        ((4, 5), 32, False),
        ((4, 5, 6), 32, True),
        ((4, 5, 6), 16, False),
        ((0, 4, 8), 32, False),
        ((0, 1, 2, 3, 16, 17, 18, 19), 48, False),
    ],
    ids=["two", "three", "three of few nodes", "three racks", "half in each of two racks"],
)
def test_few_or_scattered_nodes_have_no_common_cause(
    nodes: tuple[int, ...], count: int, reported: bool
) -> None:
    assert headline(slow(nodes, rack, count=count)).startswith("3 of the 3" if reported else "host-")


def test_random_faulty_nodes_rarely_look_like_a_common_cause() -> None:
    chosen = random.Random(1)
    reported = 0
    for _ in range(20):
        nodes = chosen.sample(range(16), 4)
        if len({node // 4 for node in nodes}) > 1:
            reported += headline(slow(nodes, rack)).startswith("3 of")
    assert reported <= 1


@pytest.mark.parametrize(
    ("rails", "reported"),
    [
        ({1: 3, 5: 3, 9: 3, 12: 3}, "4 of the 4 slow rails are rail 3"),
        ({1: 3, 5: 3, 9: 3, 12: 3, 14: 0}, "4 of the 5 slow rails are rail 3"),
        ({1: 3, 5: 3, 9: 3}, None),  # one time in 64
        ({1: 0, 5: 1, 9: 2, 12: 3}, None),
    ],
)
def test_slow_rails_with_the_same_number_are_reported_with_their_rail_first(
    rails: dict[int, int], reported: str | None
) -> None:
    cluster = Cluster(nodes=16, speed=45, rails=dict.fromkeys(rails.items(), 0.5))
    text = headline(with_pairs(gpu_run(16), cluster))
    assert text.startswith(f"{reported}: check its switches first. Rail" if reported else "Rail")
