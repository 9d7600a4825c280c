"""Pairs are compared within a class of paths: node kinds, leaves, NVLink domains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from checklist.analysis.diagnosis import PASSES, Diagnosis, diagnose
from checklist.analysis.paths import Paths
from checklist.measurements import Facts
from tests.checklist.clusters import Cluster
from tests.checklist.runs import facts

NVLINK, NIC, SLOW_NIC = 400.0, 48.0, 12.0


def reported(nodes: int, change: Callable[[int], dict[str, object]]) -> list[Facts]:
    return [dataclasses.replace(facts(node, 1), **change(node)) for node in range(nodes)]


def domains_of(size: int, nodes: int = 8) -> Paths:
    return Paths.from_facts(reported(nodes, lambda node: {"nvlink_domain": f"rack-{node // size}.0"}), nodes)


def leaves_of(size: int, nodes: int = 8) -> Paths:
    layers = reported(
        nodes, lambda node: {"network_nodes": ("spine", f"leaf-{node // size}", f"host-{node}")}
    )
    return Paths.from_facts(layers, nodes)


def examine(cluster: Cluster, paths: Paths) -> Diagnosis:
    pairs = cluster.first_pass()
    for _ in range(PASSES + 1):
        diagnosis = diagnose(pairs, cluster.nodes, paths=paths)
        pairs += cluster.second_pass(diagnosis.again)
    return diagnosis


def racks(src: int, dst: int) -> float:
    return NVLINK if src // 4 == dst // 4 else NIC


def oversubscribed(src: int, dst: int) -> float:
    return NIC if src // 4 == dst // 4 else NIC / 2


def mixed(src: int, dst: int) -> float:
    return SLOW_NIC if max(src, dst) >= 4 else NIC


KINDS = Paths.from_facts(reported(8, lambda node: {"gpu_names": ("A100" if node >= 4 else "H100",)}), 8)
CLUSTERS = pytest.mark.parametrize(
    ("path", "paths"),
    [(racks, domains_of(4)), (oversubscribed, leaves_of(4)), (mixed, KINDS)],
    ids=["two NVLink domains", "two leaves", "two kinds"],
)


@CLUSTERS
def test_a_healthy_cluster_with_unequal_paths_has_no_faults(
    path: Callable[[int, int], float], paths: Paths
) -> None:
    diagnosis = examine(Cluster(nodes=8, path=path), paths)
    assert (diagnosis.faults, diagnosis.undecided, diagnosis.uneven) == ((), (), ())
    assert len(diagnosis.references) > 1


@CLUSTERS
def test_a_slow_node_of_either_kind_is_named_in_a_cluster_with_unequal_paths(
    path: Callable[[int, int], float], paths: Paths
) -> None:
    for node in (1, 6):
        best = max(path(node, other) for other in range(8) if other != node and path(node, other) < NVLINK)

        def halved(src: int, dst: int, node: int = node, limit: float = best / 2) -> float:
            return min(path(src, dst), limit) if node in (src, dst) else path(src, dst)

        diagnosis = examine(Cluster(nodes=8, path=halved), paths)
        assert {(fault.kind, fault.node) for fault in diagnosis.with_status("confirmed")} == {("node", node)}


@pytest.mark.parametrize("nodes", [6, 8, 16])
def test_a_few_faster_paths_do_not_make_other_paths_slow(nodes: int) -> None:
    fast = Cluster(nodes=nodes, path=lambda src, dst: NVLINK if {src, dst} == {0, 1} else NIC)
    diagnosis = examine(fast, Paths.uniform(nodes))
    assert (diagnosis.faults, diagnosis.undecided) == ((), ())
    ((one),) = diagnosis.uneven
    assert (one.fast, one.nodes, one.path) == ((0, 1), nodes, "between nodes")


def test_a_path_counts_as_faster_only_if_both_directions_are_fast() -> None:
    lucky = Cluster(nodes=6, path=lambda src, dst: 1.25 * NIC if (src, dst) == (1, 2) else NIC)
    assert examine(lucky, Paths.uniform(6)).uneven == ()
    both = Cluster(nodes=6, path=lambda src, dst: 1.25 * NIC if {src, dst} == {1, 2} else NIC)
    assert [one.fast for one in examine(both, Paths.uniform(6)).uneven] == [(1, 2)]


def test_a_slow_node_in_a_leaf_of_two_is_judged_against_other_leaves() -> None:
    slow = Cluster(nodes=6, transmit={0: 0.85}, receive={0: 0.85})
    layers = reported(6, lambda node: {"network_nodes": ("spine", f"leaf-{node // 2}")})
    (fault,) = examine(slow, Paths.from_facts(layers, 6)).with_status("confirmed")
    assert (fault.node, fault.slight) == (0, True)


def test_a_leaf_is_the_smallest_network_unit_shared_by_two_nodes() -> None:
    assert leaves_of(4).leaves == (0, 0, 0, 0, 1, 1, 1, 1)
    assert Paths.from_facts(reported(3, lambda node: {"network_nodes": (f"host-{node}",)}), 3).leaves == (
        -1,
        -1,
        -1,
    )


def test_a_node_of_unknown_kind_counts_as_the_most_common_kind() -> None:
    names = reported(4, lambda node: {"gpu_names": () if node == 2 else ("H100",), "instance_type": None})
    assert Paths.from_facts(names, 4).kinds == (0, 0, 0, 0)


@pytest.mark.parametrize(("within", "over"), [(False, "network"), (True, "nvlink")])
def test_a_node_slow_over_one_of_two_networks_is_named_with_that_network(within: bool, over: str) -> None:
    def path(src: int, dst: int) -> float:
        return racks(src, dst) * (0.5 if 2 in (src, dst) and (src // 4 == dst // 4) == within else 1.0)

    (fault,) = examine(Cluster(nodes=8, path=path), domains_of(4)).with_status("confirmed")
    assert (fault.kind, fault.node, fault.over) == ("node", 2, over)
