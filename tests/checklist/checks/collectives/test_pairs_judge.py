"""Judging of the network between nodes: cut off, slow and hung nodes are named."""

from __future__ import annotations

import dataclasses

import pytest

from checklist import result as results
from checklist.measurements import Hang, Nic, Phase
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import GIB, codes, cpu_run, gpu_run, mesh, verdict_of, with_pairs


def test_a_pair_that_connects_but_transfers_nothing_is_an_mtu_fault() -> None:
    assert codes(dataclasses.replace(gpu_run(4), probes=mesh(4, stalled=((0, 1),)))) == {"mtu": "FAIL"}


def test_an_unreachable_node_is_named_instead_of_all_its_pairs() -> None:
    cut = tuple((a, b) for a in range(4) for b in range(4) if a != b and 2 in (a, b))
    result = judge(dataclasses.replace(gpu_run(4), probes=mesh(4, cut=cut)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("node-unreachable", ("host-2",))]
    assert result.bad_nodes == ("host-2",)


def test_a_cut_pair_is_one_finding_and_not_also_a_slow_link() -> None:
    both = ((1, 3), (3, 1))
    cut = with_pairs(cpu_run(4, probes=mesh(4, cut=both)), Cluster(nodes=4, cut=frozenset(both)))
    result = judge(cut)
    assert [(fault.check, fault.code) for fault in result.findings] == [("mesh", "pair-cut")]
    assert "And" not in result.headline
    assert verdict_of(result, "pairs") == "NO-VERDICT"
    unasked = judge(dataclasses.replace(cut, probes=()))
    assert [fault.title for fault in unasked.findings] == ["No data passes between host-1 and host-3."]


@pytest.mark.parametrize(
    ("cluster", "code", "bad"),
    [
        (Cluster(nodes=4, transmit={2: 0.25}, receive={2: 0.25}), "slow-node", ("host-2",)),
        (Cluster(nodes=4, transmit={2: 0.25}), "slow-transmit", ("host-2",)),
        (Cluster(nodes=4, receive={2: 0.25}), "slow-receive", ("host-2",)),
        (Cluster(nodes=4, links={(1, 3): 0.2, (3, 1): 0.2}), "slow-link", ()),
    ],
)
def test_slow_nodes_directions_and_links_are_named(cluster: Cluster, code: str, bad: tuple[str, ...]) -> None:
    result = judge(with_pairs(cpu_run(4), cluster))
    assert [(fault.code, fault.verdict) for fault in result.findings] == [(code, "FAIL")]
    assert result.bad_nodes == bad
    assert not set(result.healthy_nodes) & {"host-1", "host-3"} if code == "slow-link" else True


def test_a_suspect_that_was_not_measured_again_is_only_a_warning() -> None:
    result = judge(with_pairs(cpu_run(4), Cluster(nodes=4, transmit={2: 0.25}), again=False))
    assert [(fault.code, fault.verdict, fault.nodes) for fault in result.findings] == [
        ("slow-suspect", "WARN", ())
    ]


def test_a_slow_pair_in_a_run_of_two_nodes_names_no_node() -> None:
    result = judge(with_pairs(cpu_run(2), Cluster(nodes=2, transmit={1: 0.4})))
    assert result.verdict == "FAIL"
    assert "two nodes do not show" in result.headline
    assert (result.bad_nodes, result.healthy_nodes) == ((), ())


@pytest.mark.parametrize(("nodes", "expected"), [(2, "NO-VERDICT"), (3, "NO-VERDICT"), (4, "PASS")])
def test_fewer_than_four_equal_nodes_are_not_compared_with_peers(nodes: int, expected: str) -> None:
    assert verdict_of(judge(cpu_run(nodes)), "pairs") == expected


def test_a_plain_socket_network_is_judged_by_its_line_rate() -> None:
    nic = Nic(name="eth0", gbps=10.0, up=True)
    run = cpu_run(4)
    reported = tuple(
        dataclasses.replace(f, nics=(dataclasses.replace(nic, addresses=f.addresses),), instance_type=None)
        for f in run.facts
    )
    slow = tuple(
        dataclasses.replace(pair, gbytes_per_s=0.5, bytes=GIB) for pair in Cluster(nodes=4).first_pass()
    )
    result = judge(dataclasses.replace(run, facts=reported, pairs=slow, collectives=()))
    assert {fault.code: fault.verdict for fault in result.findings} == {"below-expected": "FAIL"}
    assert "10 Gbit/s (TCP) = 1.25 GB/s a node" in result.findings[0].title


def test_a_hang_names_rank_node_and_operation() -> None:
    hang = Hang(rank=9, node=1, phase="world", op="all_gather", sequence=3, waited_s=30)
    failed = (Phase(name="world", status="failed", reason="timed out"),)
    result = judge(dataclasses.replace(gpu_run(), hangs=(hang,), phases=failed))
    assert result.findings[0].title == (
        "Rank 9 (host-1) hung in all_gather of phase world after 3 operations; waited for 30 s."
    )
    assert result.bad_nodes == ("host-1",)


def test_a_hang_is_reported_before_the_collective_it_broke() -> None:
    run = gpu_run()
    hang = Hang(rank=9, node=1, phase="world", op="all_gather", sequence=3, waited_s=30)
    ended = "all_gather was ended after 30.0 s: it waited for rank 9"
    failed = dataclasses.replace(run.collectives[1], op="all_gather", correct=None, error=ended)
    result = judge(dataclasses.replace(run, hangs=(hang,), collectives=(*run.collectives, failed)))
    assert [fault.check for fault in result.findings] == ["hangs", "correctness"]
    assert result.headline.startswith("Rank 9 (host-1) hung in all_gather")


@pytest.mark.parametrize(
    ("cluster", "code", "blamed"),
    [
        (Cluster(nodes=6, transmit={2: 0.86}, receive={2: 0.86}), "slow-node", ("host-2",)),
        (Cluster(nodes=6, links={(1, 3): 0.86, (3, 1): 0.86}), "slow-link", ()),
    ],
)
def test_a_slightly_slow_node_gives_a_warning(cluster: Cluster, code: str, blamed: tuple[str, ...]) -> None:
    result = judge(with_pairs(cpu_run(6), cluster))
    assert [(fault.code, fault.verdict, fault.nodes) for fault in result.findings] == [(code, "WARN", blamed)]
    assert (result.verdict, result.bad_nodes, len(result.healthy_nodes)) == ("WARN", (), 6)


def test_a_few_much_faster_nodes_give_a_warning_and_do_not_make_others_slow() -> None:
    nine_nodes = Cluster(nodes=8, path=lambda a, b: 90.0 if {a, b} == {0, 1} else 45.0)
    (fault,) = judge(with_pairs(cpu_run(8), nine_nodes)).findings
    assert (fault.code, fault.verdict, fault.suspects) == ("uneven", "WARN", ("host-0", "host-1"))


def test_a_node_that_only_sends_is_reported_as_blocked_inbound() -> None:
    inbound = tuple((other, 2) for other in range(5) if other != 2)
    blocked = with_pairs(cpu_run(5, probes=mesh(5, cut=inbound)), Cluster(nodes=5, cut=frozenset(inbound)))
    (fault,) = judge(blocked).findings
    assert (fault.check, fault.code, fault.nodes) == ("mesh", "inbound-blocked", ("host-2",))
    assert fault.title == "host-2 reaches the others, and none reaches it: only inbound is blocked."
    outbound = tuple(pair[::-1] for pair in inbound)
    assert codes(cpu_run(5, probes=mesh(5, cut=outbound))) == {"outbound-blocked": "FAIL"}


def test_a_lost_node_does_not_make_a_link_slow() -> None:
    """The node was killed in the first round: its partners got no answer either."""
    run = cpu_run(6)
    hang = Hang(rank=3, node=3, phase="pairs", op="send", sequence=1, waited_s=3.0, kind="lost")
    first = {pair.round for pair in run.pairs if 3 in (pair.src, pair.dst)}
    broken = min(first)
    pairs = tuple(
        dataclasses.replace(pair, gbytes_per_s=None, error="the node is gone")
        if pair.round == broken or 3 in (pair.src, pair.dst)
        else pair
        for pair in run.pairs
    )
    result = judge(dataclasses.replace(run, pairs=pairs, hangs=(hang,)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("lost", ("host-3",))]


def test_a_node_lost_before_it_reported_facts_is_named_as_it_joined() -> None:
    run = gpu_run(3, 1)
    hang = Hang(rank=2, node=2, phase="facts", op="facts", sequence=None, waited_s=3.0, kind="lost")
    run_after_loss = dataclasses.replace(
        run, facts=run.facts[:2], hangs=(hang,), hosts={0: "host-0", 1: "host-1", 2: "gpu-17"}
    )
    result = judge(run_after_loss)
    titles = [fault.title for fault in result.findings if fault.check in ("hangs", "ranks")]
    assert titles == [
        "Rank 2 (gpu-17) was lost in facts of phase facts.",
        "3 ranks on 3 nodes requested, 2 on 2 seen; without gpu-17.",
    ]
    assert result.bad_nodes == ("gpu-17",)
    assert results.from_json(results.to_json(result)) == result


@pytest.mark.parametrize(("nodes", "bandwidth_left"), [(6, 0.3), (8, 0.5)])
def test_all_paths_between_two_groups_of_nodes_are_one_slow_uplink(nodes: int, bandwidth_left: float) -> None:
    half = nodes // 2
    slow = {(a, b): bandwidth_left for a in range(nodes) for b in range(nodes) if (a < half) != (b < half)}
    result = judge(with_pairs(gpu_run(nodes), Cluster(nodes=nodes, speed=45, links=slow)))
    (fault,) = [one for one in result.findings if one.check == "pairs"]
    assert (fault.code, fault.verdict, fault.nodes) == ("slow-uplink", "FAIL", ())
    assert len(fault.links) == half**2
    assert (
        f"each of the {half**2} paths over it has {bandwidth_left:.0%} of its expected bandwidth."
        in fault.title
    )
    assert result.bad_nodes == ()
    assert result.verdict == "FAIL"


def test_a_slow_rail_of_a_node_is_named_with_its_gpu_and_not_as_a_slow_node() -> None:
    result = judge(with_pairs(gpu_run(4), Cluster(nodes=4, speed=45, rails={(2, 5): 0.5})))
    (fault,) = result.findings
    assert fault.title == (
        "Rail 5 of host-2 (GPU 5 and its network card) is slow in both directions: 50% of what its "
        "neighbors carry."
    )
    assert (fault.code, fault.verdict, fault.nodes, fault.ranks) == ("slow-rail", "FAIL", ("host-2",), (21,))
    assert result.bad_nodes == ("host-2",)


def test_a_rail_that_is_slow_everywhere_is_attributed_to_its_switch() -> None:
    everywhere = {(node, 3): 0.5 for node in range(4)}
    result = judge(with_pairs(gpu_run(4), Cluster(nodes=4, speed=90, rails=everywhere)))
    (fault,) = (one for one in result.findings if one.check == "pairs")
    assert fault.title.startswith("Rail 3 is slow on all 4 nodes (host-0, host-1, host-2, host-3): 50%")
    assert (fault.code, fault.verdict, result.bad_nodes) == ("slow-rail-everywhere", "FAIL", ())


def test_a_slow_rail_between_two_nodes_makes_both_suspects() -> None:
    result = judge(with_pairs(gpu_run(2), Cluster(nodes=2, speed=90, rails={(1, 0): 0.5})))
    (fault,) = (one for one in result.findings if one.code == "slow-rail")
    assert (fault.suspects, fault.nodes, fault.ranks) == (("host-0", "host-1"), (), (0, 8))


def test_the_finding_of_a_slow_link_names_its_rail() -> None:
    run = with_pairs(gpu_run(4), Cluster(nodes=4, speed=45, links={(1, 3): 0.5}))
    pairs = [
        dataclasses.replace(pair, rails=(2.8, *[5.6 if (pair.src, pair.dst) == (1, 3) else 2.8] * 7))
        for pair in run.pairs
    ]
    (fault,) = judge(dataclasses.replace(run, pairs=tuple(pairs))).findings
    assert fault.title.startswith("The link from host-1 to host-3 is slow: 5")
    assert fault.title.endswith(" of the expected speed on rail 0 alone.")
