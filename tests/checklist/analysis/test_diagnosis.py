"""Diagnosis of pair bandwidths: the faulty node, direction or link, or an undecided result."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checklist.analysis.diagnosis import PASSES, Diagnosis, diagnose
from checklist.analysis.second_pass import MAX_RERUNS
from tests.checklist.clusters import Cluster


def examine(cluster: Cluster, *, spec: float | None = None, crowded: float = 1.0, seed: int = 0) -> Diagnosis:
    """Run both measurement passes."""
    pairs = cluster.first_pass(seed, crowded)
    diagnosis = diagnose(pairs, cluster.nodes, spec_gbytes_per_s=spec)
    assert not diagnosis.with_status("confirmed"), "accused before the slow pairs were measured again"
    for _ in range(PASSES):
        pairs += cluster.second_pass(diagnosis.again)
        diagnosis = diagnose(pairs, cluster.nodes, spec_gbytes_per_s=spec)
    assert diagnosis.again == ()
    return diagnosis


def named_faults(diagnosis: Diagnosis) -> list[tuple[object, ...]]:
    return [
        (fault.kind, fault.node)
        if fault.node is not None
        else (fault.kind, fault.src, fault.dst, fault.both_ways)
        for fault in diagnosis.with_status("confirmed")
    ]


SIZES = pytest.mark.parametrize("nodes", [3, 4, 5, 8, 33])


@SIZES
def test_a_healthy_cluster_has_no_faults(nodes: int) -> None:
    for seed in range(20):
        diagnosis = examine(Cluster(nodes=nodes), seed=seed)
        assert (diagnosis.faults, diagnosis.undecided, diagnosis.again) == ((), (), ())


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_a_slow_link_is_named_and_its_nodes_are_not(nodes: int) -> None:
    diagnosis = examine(Cluster(nodes=nodes, links={(0, 2): 0.2, (2, 0): 0.2}))
    assert named_faults(diagnosis) == [("link", 0, 2, True)]
    assert diagnosis.bad_nodes == ()


def test_a_cut_pair_is_reported_as_a_link_with_zero_bandwidth() -> None:
    diagnosis = examine(Cluster(nodes=4, cut=frozenset({(1, 3), (3, 1)})))
    assert named_faults(diagnosis) == [("link", 1, 3, True)]
    assert diagnosis.faults[0].ratio == 0


def test_an_unreachable_node_is_named_instead_of_its_links() -> None:
    cut = frozenset({(a, b) for a in range(4) for b in range(4) if a != b and 2 in (a, b)})
    assert named_faults(examine(Cluster(nodes=4, cut=cut))) == [("node", 2)]


@pytest.mark.parametrize("nodes", [4, 6, 8])
def test_up_to_half_of_the_nodes_are_named_as_slow(nodes: int) -> None:
    slow = dict.fromkeys(range(nodes // 2), 0.6)
    diagnosis = examine(Cluster(nodes=nodes, transmit=slow, receive=slow))
    assert diagnosis.bad_nodes == tuple(range(nodes // 2))


def test_a_slow_link_of_a_slow_node_is_named_in_addition_to_the_node() -> None:
    cluster = Cluster(nodes=5, transmit={0: 0.6}, receive={0: 0.6}, links={(0, 1): 0.1, (1, 0): 0.1})
    assert named_faults(examine(cluster)) == [("node", 0), ("link", 0, 1, True)]


def test_a_direction_that_was_slow_once_between_two_nodes_is_cleared() -> None:
    first = Cluster(nodes=2, transmit={1: 0.5}).first_pass()
    before = diagnose(first, 2)
    assert not before.undecided_settled
    assert set(before.again) == {(0, 1), (1, 0)}
    diagnosis = diagnose((*first, *Cluster(nodes=2).second_pass(before.again)), 2)
    assert (diagnosis.undecided, diagnosis.why, diagnosis.again) == ((), None, ())


def test_a_healthy_receiver_is_not_named_if_two_of_three_nodes_send_slowly() -> None:
    """Everything that reaches node 2 is slow, but both of its senders are slow."""
    diagnosis = examine(Cluster(nodes=3, transmit={0: 0.5, 1: 0.5}))
    assert named_faults(diagnosis) == []
    assert diagnosis.why == "too-few-witnesses"


@pytest.mark.parametrize(
    ("share", "fragment"), [(0.95, "nothing"), (0.9, "slight"), (0.85, "slight"), (0.75, "slow")]
)
@pytest.mark.parametrize("kind", ["node", "link"])
def test_nodes_between_80_and_92_percent_are_slightly_slow_and_above_are_healthy(
    kind: str, share: float, fragment: str
) -> None:
    sides = {2: share} if kind == "node" else {}
    links = {(1, 2): share, (2, 1): share} if kind == "link" else {}
    diagnosis = examine(Cluster(nodes=6, transmit=sides, receive=sides, links=links))
    expected = [("node", 2) if kind == "node" else ("link", 1, 2, True)]
    assert named_faults(diagnosis) == ([] if fragment == "nothing" else expected)
    assert [fault.slight for fault in diagnosis.with_status("confirmed")] == [fragment == "slight"] * len(
        named_faults(diagnosis)
    )


def test_no_node_is_slightly_slow_if_healthy_links_vary_as_much() -> None:
    wide = {(a, b): 0.86 + 0.14 * ((5 * a + 3 * b) % 7) / 6 for a in range(6) for b in range(6)}
    diagnosis = examine(Cluster(nodes=6, links={**wide, (1, 2): 0.82}))
    assert named_faults(diagnosis) == []


def test_pairs_slow_only_under_load_are_cleared_by_measuring_them_alone() -> None:
    diagnosis = examine(Cluster(nodes=8), crowded=0.6)
    assert named_faults(diagnosis) == []
    assert diagnosis.with_status("cleared")


def test_a_slow_node_is_named_even_if_a_shared_switch_slows_other_nodes() -> None:
    diagnosis = examine(Cluster(nodes=8, transmit={5: 0.4}, receive={5: 0.4}), crowded=0.6)
    assert named_faults(diagnosis) == [("node", 5)]


def test_only_slow_pairs_and_a_few_controls_are_measured_again() -> None:
    before = diagnose(Cluster(nodes=16, transmit={3: 0.5}).first_pass(), 16)
    assert {src for src, _ in before.again if src == 3} == {3}
    assert sum(src == 3 for src, _ in before.again) == 3
    assert sum(3 not in pair for pair in before.again) == 2


def test_a_node_that_was_slow_in_a_single_repetition_is_not_named() -> None:
    cluster = Cluster(nodes=4, transmit={3: 0.5})
    first = cluster.first_pass()
    once = (*first, *cluster.second_pass(diagnose(first, 4).again))
    assert [fault.status for fault in diagnose(once, 4).faults] == ["suspect"]
    recovered = Cluster(nodes=4).second_pass(diagnose(once, 4).again)
    diagnosis = diagnose((*once, *recovered), 4)
    assert [fault.status for fault in diagnosis.faults] == ["cleared"]
    assert diagnosis.again == ()


def test_the_second_pass_ends_even_if_every_link_is_suspect() -> None:
    links = {(a, b): 0.3 for a in range(32) for b in range(32) if abs(a - b) != 16}
    assert len(diagnose(Cluster(nodes=32, links=links).first_pass(), 32).again) <= MAX_RERUNS


def test_a_run_without_measurements_has_no_diagnosis() -> None:
    diagnosis = diagnose((), 4)
    assert diagnosis.reference_gbytes_per_s is None
    assert diagnosis.transmit == (None,) * 4
    assert diagnosis.faults == ()


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 12), st.data())
def test_a_single_fault_of_any_kind_never_blames_healthy_nodes_or_links(
    nodes: int, data: st.DataObject
) -> None:
    a = data.draw(st.integers(0, nodes - 1))
    b = data.draw(st.integers(0, nodes - 1).filter(lambda other: other != a))
    share = data.draw(st.floats(0.01, 0.7))
    kind = data.draw(st.sampled_from(["node", "transmit", "receive", "link"]))
    cluster = Cluster(
        nodes=nodes,
        transmit={a: share} if kind in ("node", "transmit") else {},
        receive={a: share} if kind in ("node", "receive") else {},
        links={(a, b): share} if kind == "link" else {},
    )
    expected = ("link", a, b, False) if kind == "link" else (kind, a)
    assert named_faults(examine(cluster)) == [expected]


@pytest.mark.parametrize(
    ("nodes", "slow", "why", "undecided"),
    [(2, 1, "two-nodes", 2), (3, 2, "no-good-pair", 6), (6, 6, "no-good-pair", 30)],
)
def test_no_node_is_named_if_all_pairs_are_below_the_spec(
    nodes: int, slow: int, why: str, undecided: int
) -> None:
    share = dict.fromkeys(range(slow), 0.5)
    cluster = Cluster(nodes=nodes, transmit=share, receive=share)
    diagnosis = examine(cluster, spec=24.0)
    assert (named_faults(diagnosis), diagnosis.why, len(diagnosis.undecided)) == ([], why, undecided)
    assert slow < nodes or examine(cluster).undecided == (), "unknown without a spec"
