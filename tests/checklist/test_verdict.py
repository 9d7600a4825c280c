"""Measurements in, verdicts out: the right name for each fault, and no PASS for what was not measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from checklist import checks
from checklist.judges import thresholds
from checklist.judges.speed import peers
from checklist.measurements import Hang, Local, Measurements, Nic, Pair, Phase
from checklist.result import Result
from checklist.verdict import JUDGES, judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import (
    GIB,
    all_with,
    codes,
    collective,
    cpu_run,
    facts,
    gpu_run,
    healthy_gpu,
    mesh,
    past_of,
    spoil,
    with_health,
    with_pairs,
)


def verdict_of(result: Result, check: str) -> str:
    found = result.check(check)
    return "skipped" if found is None else found.verdict


def test_every_check_has_a_judge() -> None:
    assert {*JUDGES, "pairs"} == set(checks.CHECKS)


@pytest.mark.parametrize("nodes", [2, 4, 33])
def test_a_healthy_cluster_passes_with_all_its_nodes(nodes: int) -> None:
    result = judge(gpu_run(nodes))
    assert (result.verdict, result.findings, result.bad_nodes) == ("PASS", (), ())
    assert result.healthy_nodes == result.nodes
    assert len(result.nodes) == nodes


def test_a_healthy_cluster_without_gpus_passes() -> None:
    result = judge(cpu_run(4))
    assert result.verdict == "PASS"
    assert verdict_of(result, "gpu-health") == "skipped"
    assert "Not judged: gemm" in result.headline


def test_nodes_on_one_machine_pass_and_say_nothing_of_a_network() -> None:
    run = cpu_run(
        2,
        local=True,
        pairs=(Pair(src=0, dst=1, round=0, gbytes_per_s=2.0), Pair(src=1, dst=0, round=1, gbytes_per_s=0.9)),
    )
    result = judge(run)
    assert result.verdict == "PASS"
    assert verdict_of(result, "pairs") == "NO-VERDICT"
    assert result.busbw_gbytes_per_s is None
    assert result.records == ()


def test_one_node_alone_has_no_network_to_check_and_passes() -> None:
    result = judge(gpu_run(1, 4, probes=(), pairs=()))
    assert result.verdict == "PASS"
    assert {"mesh", "pairs"} <= {item.check for item in result.skipped}


def test_nothing_measured_is_no_verdict_and_nobody_is_healthy() -> None:
    run = Measurements(
        started_unix=0,
        seconds=1,
        profile="quick",
        device="cpu",
        backend="gloo",
        nodes_asked=2,
        gpus_per_node_asked=1,
    )
    result = judge(run)
    assert result.verdict == "NO-VERDICT"
    assert result.exit_code == 3
    assert result.healthy_nodes == ()
    assert not {check.check for check in result.checks if check.verdict == "PASS"}


@pytest.mark.parametrize(
    ("missing", "check"),
    [
        ("facts", "ranks"),
        ("probes", "mesh"),
        ("locals", "gemm"),
        ("collectives", "correctness"),
        ("pairs", "pairs"),
    ],
)
def test_a_decisive_check_without_measurements_leaves_the_run_without_a_verdict(
    missing: str, check: str
) -> None:
    nothing: Any = {missing: ()}
    result = judge(dataclasses.replace(gpu_run(4), **nothing))
    assert verdict_of(result, check) == "NO-VERDICT"
    assert result.verdict == "NO-VERDICT"


def test_a_check_that_was_not_asked_for_does_not_count() -> None:
    run = dataclasses.replace(gpu_run(), pairs=(), collectives=())
    result = judge(run, checks=checks.select(only=["mesh", "ranks"]))
    assert result.verdict == "PASS"
    assert {"pairs", "bandwidth"} <= {item.check for item in result.skipped}


def nic(**changes: Any) -> Nic:
    return dataclasses.replace(
        Nic(name="eth0", addresses=("10.0.0.9",), mtu=9001, gbps=100.0, up=True), **changes
    )


def with_nic(run: Measurements) -> Measurements:
    return all_with(run, nics=(nic(),))


FAULTS: list[tuple[str, Measurements, str, str]] = [
    ("a lost rank", dataclasses.replace(gpu_run(), facts=gpu_run().facts[:-1]), "ranks-missing", "FAIL"),
    ("separate jobs", dataclasses.replace(gpu_run(1, 4), nodes_asked=2), "ranks-separate", "FAIL"),
    ("one host", spoil(gpu_run(2, 1), 1, boot_id="boot-0"), "nodes-share-host", "FAIL"),
    ("one GPU twice", spoil(gpu_run(2, 1), 1, gpu_uuids=("GPU-0-0",)), "gpu-shared", "FAIL"),
    ("7 of 8 GPUs", spoil(gpu_run(), 8, gpu_uuids=("u",) * 7), "gpu-count", "FAIL"),
    ("a busy GPU", spoil(gpu_run(), 3, gpu_processes=1), "gpu-busy", "WARN"),
    ("another driver", spoil(gpu_run(), 9, versions={"driver": "535.1"}), "versions-differ", "FAIL"),
    ("another kernel", spoil(gpu_run(), 9, versions={"kernel": "6.1"}), "", ""),
    ("64 MB /dev/shm", spoil(gpu_run(), 8, shm_bytes=64 * 2**20), "shm-small", "FAIL"),
    ("memlock", spoil(gpu_run(), 8, memlock_bytes=65536), "memlock-low", "FAIL"),
    ("loopback", spoil(gpu_run(), 8, nic="lo"), "nic-wrong", "FAIL"),
    ("no such interface", spoil(gpu_run(), 8, nic="eth9"), "nic-wrong", "FAIL"),
    ("no EFA", spoil(gpu_run(), 8, efa_devices=0), "rdma-missing", "FAIL"),
    ("hostname", spoil(gpu_run(), 8, resolves_own_hostname=False), "hostname-unresolved", "FAIL"),
    ("hostname on loopback", spoil(gpu_run(), 8, hostname_address="127.0.1.1"), "hostname-loopback", "WARN"),
    ("clock", spoil(gpu_run(), 8, clock_offset_s=5.0), "clock-skew", "WARN"),
    ("zones", spoil(gpu_run(), 8, zone="us-east-1b"), "zones-differ", "WARN"),
    ("a slower interface", spoil(with_nic(gpu_run(4)), 24, nics=(nic(gbps=10.0),)), "nic-rate", "WARN"),
    ("another MTU", spoil(with_nic(gpu_run(4)), 24, nics=(nic(mtu=1500),)), "mtu-differs", "WARN"),
    ("placement groups", spoil(gpu_run(), 8, placement_group="other"), "groups-differ", "WARN"),
    ("torch that hangs", all_with(gpu_run(), versions={"torch": "2.7.0+cu126"}), "torch-hang", "WARN"),
    ("torch that is mended", all_with(gpu_run(), versions={"torch": "2.7.1+cu126"}), "", ""),
    ("torch from before", all_with(gpu_run(), versions={"torch": "2.6.0"}), "", ""),
    ("an NVLink down", with_health(gpu_run(), 9, nvlinks_active=17), "nvlink-down", "FAIL"),
    ("a narrow slot", with_health(gpu_run(), 9, pcie_width=8), "pcie-narrow", "WARN"),
    ("cut", dataclasses.replace(gpu_run(4), probes=mesh(4, cut=((1, 3), (3, 1)))), "pair-cut", "FAIL"),
    ("MTU", dataclasses.replace(gpu_run(4), probes=mesh(4, stalled=((0, 1),))), "mtu", "FAIL"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "run", "code", "level"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_under_its_name(what: str, run: Measurements, code: str, level: str) -> None:
    assert codes(run) == ({code: level} if code else {})


def test_ill_gpus_are_named_with_their_node() -> None:
    run = gpu_run()
    for changes, code in (
        ({"ecc_uncorrected": 2}, "ecc"),
        ({"remap_failed": True}, "remap-failed"),
        ({"remap_pending": True}, "remap-pending"),
        ({"xids": (79,)}, "xid-reboot"),
        ({"xids": (31, 48)}, "xid-reset"),
        ({"xids": (54,)}, "xid-isolate"),
        ({"xids": (31,)}, "xid-monitor"),
        ({"xids": (9999,)}, "xid-monitor"),
        ({"xids_earlier": (13, 119)}, "xid-earlier"),
        ({"recovery_action": "GPU reset"}, "recovery"),
        ({"throttle_reasons": ("hardware thermal slowdown",)}, "throttled"),
    ):
        ill = dataclasses.replace(healthy_gpu(9, 8, "after"), **changes)
        result = judge(dataclasses.replace(run, health=(*run.health, ill)))
        assert [(fault.code, fault.nodes, fault.ranks) for fault in result.findings] == [
            (code, ("host-1",), (9,))
        ]


def test_an_applications_own_xids_from_before_the_run_are_nothing_against_the_gpu() -> None:
    run = gpu_run()
    told = tuple(dataclasses.replace(state, xids_earlier=(13, 31, 43)) for state in run.health)
    assert codes(dataclasses.replace(run, health=told)) == {}


def test_xids_that_can_not_be_read_are_no_pass() -> None:
    run = gpu_run()
    blind = tuple(dataclasses.replace(state, xids=None) for state in run.health)
    result = judge(dataclasses.replace(run, health=blind))
    assert verdict_of(result, "gpu-health") == "NO-VERDICT"
    assert result.verdict == "PASS"
    assert "Not judged: gpu-health" in result.headline


def test_a_node_that_nobody_reaches_is_named_instead_of_all_its_pairs() -> None:
    cut = tuple((a, b) for a in range(4) for b in range(4) if a != b and 2 in (a, b))
    result = judge(dataclasses.replace(gpu_run(4), probes=mesh(4, cut=cut)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("node-unreachable", ("host-2",))]
    assert result.bad_nodes == ("host-2",)


def test_a_pair_that_is_cut_is_one_finding_and_not_a_slow_link_too() -> None:
    both = ((1, 3), (3, 1))
    cut = with_pairs(cpu_run(4, probes=mesh(4, cut=both)), Cluster(nodes=4, cut=frozenset(both)))
    result = judge(cut)
    assert [(fault.check, fault.code) for fault in result.findings] == [("mesh", "pair-cut")]
    assert "And" not in result.headline
    assert verdict_of(result, "pairs") == "NO-VERDICT"
    unasked = judge(dataclasses.replace(cut, probes=()))
    assert [fault.title for fault in unasked.findings] == ["Nothing gets between host-1 and host-3."]


def test_one_slow_gpu_among_sixteen_is_named() -> None:
    run = gpu_run()
    slow = tuple(
        dataclasses.replace(item, value=float(item.value or 0) * 0.85)
        if (item.rank, item.what) == (11, "hbm_copy")
        else item
        for item in run.locals
    )
    result = judge(dataclasses.replace(run, locals=slow), thresholds=thresholds.Table(()))
    assert [(fault.code, fault.nodes, fault.ranks) for fault in result.findings] == [
        ("straggler", ("host-1",), (11,))
    ]


def test_peers_need_to_be_four_and_both_rules_to_agree() -> None:
    assert peers([100, 50, 100]) is None
    assert peers([100.0, 100.0, 100.0, 100.0, 50.0]) == ["PASS"] * 4 + ["FAIL"]
    assert peers([100.0, 100.1, 99.9, 100.0, 97.0]) == ["PASS"] * 5, "an outlier, but only 3 % below"
    assert peers([100.0, 80.0, 60.0, 90.0, 70.0]) == ["PASS"] * 5, "far below, but so is everybody"
    assert peers([100.0, 100.1, 99.9, 100.0, 93.0])[-1:] == ["WARN"]  # type: ignore[index]


def test_the_floor_is_asked_before_peers_and_history() -> None:
    run = gpu_run()
    slow = tuple(dataclasses.replace(item, value=float(item.value or 0) * 0.7) for item in run.locals)
    result = judge(dataclasses.replace(run, locals=slow), history=past_of(judge(run)))
    assert {fault.code for fault in result.findings} == {"below-floor"}
    figure = result.check("gemm").figures[0]  # type: ignore[union-attr]
    assert (figure.basis, figure.expected) == ("floor", 730.9)
    assert "MAMF" in str(figure.source)


def test_all_gpus_below_the_floor_is_one_finding_and_no_single_nodes_fault() -> None:
    run = gpu_run()
    slow = tuple(dataclasses.replace(item, value=float(item.value or 0) * 0.7) for item in run.locals)
    result = judge(dataclasses.replace(run, locals=slow))
    assert [finding.check for finding in result.findings] == ["gemm", "hbm"]
    assert "all 16 ranks is below the floor 730.9 TFLOPS (proposal)" in result.headline
    assert (result.verdict, result.bad_nodes, result.healthy_nodes) == ("FAIL", (), ())


def test_one_gpu_below_the_floor_is_named() -> None:
    run = gpu_run()
    slow = tuple(
        dataclasses.replace(item, value=600.0) if (item.rank, item.what) == (3, "gemm_bf16") else item
        for item in run.locals
    )
    result = judge(dataclasses.replace(run, locals=slow))
    assert [(fault.code, fault.ranks) for fault in result.findings] == [("below-floor", (3,))]
    assert result.bad_nodes == ("host-0",)


def test_storage_that_is_written_and_read_passes_however_fast_it_is() -> None:
    disks = tuple(Local(rank=rank, what="storage_write", value=0.1 + rank, unit="GB/s") for rank in range(16))
    result = judge(gpu_run(locals=(*gpu_run().locals, *disks)))
    assert verdict_of(result, "storage") == "PASS"
    broken = Local(rank=3, what="storage_read", value=None, unit="GB/s", error="No space left on device")
    result = judge(gpu_run(locals=(*gpu_run().locals, *disks, broken)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("storage-failed", ())]


def slow_world(factor: float, gpus: int = 8) -> Measurements:
    run = gpu_run(2, gpus)
    last = run.collectives[-1]
    slower = collective("all_reduce", last.bytes, float(last.seconds_median or 0) * factor, 2 * gpus, 2)
    return dataclasses.replace(run, collectives=(*run.collectives[:-1], slower))


def test_bandwidth_below_the_floor_fails_and_below_the_usual_warns() -> None:
    assert codes(slow_world(1.0)) == {}
    assert codes(slow_world(1.1)) == {"below-floor": "WARN"}
    assert codes(slow_world(1.5)) == {"below-floor": "FAIL"}


def test_a_system_without_a_threshold_is_judged_by_its_own_past() -> None:
    first = judge(slow_world(1.0, gpus=4))
    assert verdict_of(first, "bandwidth") == "NO-VERDICT"
    assert first.verdict == "PASS"
    past = past_of(first)
    assert codes(slow_world(1.0, gpus=4), history=past) == {}
    assert codes(slow_world(1.2, gpus=4), history=past) == {"below-history": "FAIL"}
    assert verdict_of(judge(slow_world(1.0, gpus=4), history=past), "bandwidth") == "PASS"


def test_a_users_threshold_is_found_by_the_systems_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("system,op,floor,source\nour cluster,all_reduce,470,acceptance test\n")
    table = thresholds.table(file)
    assert codes(slow_world(1.0, gpus=4), thresholds=table) == {}
    found = judge(slow_world(1.2, gpus=4), thresholds=table, system="Our cluster")
    assert [fault.code for fault in found.findings] == ["below-floor"]


def test_wrong_values_fail_and_accuse_nobody() -> None:
    run = gpu_run(4)
    wrong = dataclasses.replace(run.collectives[0], correct=False, wrong_values=7, wrong_ranks=(3,))
    result = judge(dataclasses.replace(run, collectives=(wrong, *run.collectives[1:])))
    assert [fault.code for fault in result.findings] == ["wrong-values"]
    assert "7 wrong values on rank 3" in result.headline
    assert result.bad_nodes == ()
    assert "host-0" not in result.healthy_nodes


def test_an_operation_that_was_not_compared_is_no_pass() -> None:
    run = gpu_run()
    left_out = tuple(item for item in run.collectives if item.op != "scatter")
    assert verdict_of(judge(dataclasses.replace(run, collectives=left_out)), "correctness") == "NO-VERDICT"


def test_a_topology_file_is_suspected_where_the_world_is_slow_and_the_gpus_own_copies_are_not() -> None:
    slow = dataclasses.replace(slow_world(1.5), environment={"NCCL_TOPO_FILE": "/opt/other.xml"})
    (fault,) = judge(slow).findings
    assert (fault.code, fault.verdict) == ("topology-file", "FAIL")
    assert "/opt/other.xml" in fault.advice[0]
    copies = tuple(Local(rank=r, what="peer_copy", value=100.0, unit="GB/s", peer=r ^ 1) for r in range(16))
    both = dataclasses.replace(slow, locals=(*slow.locals, *copies))
    assert codes(both) == {"peer-copy-slow": "FAIL", "below-floor": "FAIL"}


def test_the_layers_of_the_network_that_the_nodes_share_are_told() -> None:
    run = spoil(
        all_with(gpu_run(), network_nodes=("nn-1", "nn-2", "nn-3")), 8, network_nodes=("nn-1", "nn-2", "nn-9")
    )
    placed = judge(run).check("placement")
    assert placed is not None
    assert (placed.verdict, placed.reason) == (
        "PASS",
        "All nodes are in us-east-1a and share 2 of 3 layers of the network.",
    )


def test_sockets_where_there_is_efa_fail_although_they_work() -> None:
    run = gpu_run()
    assert run.transport is not None
    sockets = dataclasses.replace(run.transport, network="socket")
    assert codes(dataclasses.replace(run, transport=sockets)) == {"rdma-unused": "FAIL"}
    through_host = dataclasses.replace(run.transport, gpu_direct=False)
    assert codes(dataclasses.replace(run, transport=through_host)) == {"gdr-off": "WARN"}
    separate = dataclasses.replace(run.transport, nodes_seen=1)
    assert codes(dataclasses.replace(run, transport=separate)) == {"separate-world": "FAIL"}


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


def test_of_two_nodes_nobody_is_accused() -> None:
    result = judge(with_pairs(cpu_run(2), Cluster(nodes=2, transmit={1: 0.4})))
    assert result.verdict == "FAIL"
    assert "two nodes can't tell" in result.headline
    assert (result.bad_nodes, result.healthy_nodes) == ((), ())


@pytest.mark.parametrize(("nodes", "expected"), [(2, "NO-VERDICT"), (3, "NO-VERDICT"), (4, "PASS")])
def test_fewer_than_four_equal_nodes_have_no_peers(nodes: int, expected: str) -> None:
    assert verdict_of(judge(cpu_run(nodes)), "pairs") == expected


def test_a_hang_names_rank_node_and_operation() -> None:
    hang = Hang(rank=9, node=1, phase="world", op="all_gather", sequence=3, waited_s=30)
    failed = (Phase(name="world", status="failed", reason="timed out"),)
    result = judge(dataclasses.replace(gpu_run(), hangs=(hang,), phases=failed))
    assert result.findings[0].title == (
        "Rank 9 (host-1) hung in all_gather of phase world after 3 operations; waited for 30 s."
    )
    assert result.bad_nodes == ("host-1",)


def test_a_hang_is_told_before_the_collective_that_failed_by_it() -> None:
    run = gpu_run()
    hang = Hang(rank=9, node=1, phase="world", op="all_gather", sequence=3, waited_s=30)
    ended = "all_gather was ended after 30.0 s: it waited for rank 9"
    failed = dataclasses.replace(run.collectives[1], op="all_gather", correct=None, error=ended)
    result = judge(dataclasses.replace(run, hangs=(hang,), collectives=(*run.collectives, failed)))
    assert [fault.check for fault in result.findings] == ["hangs", "correctness"]
    assert result.headline.startswith("Rank 9 (host-1) hung in all_gather")


def test_a_phase_that_ended_early_without_a_name_is_no_verdict() -> None:
    failed = (Phase(name="pairs", status="failed", reason="timed out"),)
    result = judge(dataclasses.replace(gpu_run(), pairs=(), phases=failed))
    assert result.verdict == "NO-VERDICT"
    assert "pairs" in result.headline


def test_a_figure_that_could_not_be_measured_is_a_failure_of_its_node() -> None:
    run = gpu_run()
    broken = Local(rank=4, what="gemm_bf16", value=None, unit="TFLOPS", error="CUDA error: an illegal access")
    result = judge(dataclasses.replace(run, locals=(*run.locals, broken)))
    assert [(fault.code, fault.nodes) for fault in result.findings] == [("local-failed", ("host-0",))]


def rerun(earlier: Result, **changes: Any) -> Result:
    return judge(gpu_run(4, **changes), open_failures=earlier.open_failures())


def test_a_failure_is_cleared_only_by_the_same_check_asked_as_hard_on_that_node() -> None:
    sick = judge(with_pairs(gpu_run(4), Cluster(nodes=4, transmit={2: 0.25}, receive={2: 0.25})))
    assert [item.nodes for item in sick.open_failures()] == [("host-2",)]

    weaker = rerun(sick, profile="quick")
    assert (weaker.verdict, weaker.bad_nodes) == ("FAIL", ("host-2",))
    assert "Still open from an earlier run" in weaker.headline
    assert "host-2" not in weaker.healthy_nodes

    unmeasured = judge(dataclasses.replace(gpu_run(4), pairs=()), open_failures=sick.open_failures())
    assert unmeasured.bad_nodes == ("host-2",)

    others = tuple(fact for fact in gpu_run(4).facts if fact.node != 2)
    elsewhere = judge(gpu_run(2), open_failures=sick.open_failures())
    assert others
    assert elsewhere.verdict == "PASS", "the sick node does not take part"
    assert elsewhere.bad_nodes == ("host-2",)
    assert elsewhere.open_failures() == sick.open_failures()

    for profile in ("standard", "deep"):
        cured = rerun(sick, profile=profile)
        assert (cured.verdict, cured.bad_nodes, cured.open_failures()) == ("PASS", (), ())


def test_a_failure_of_the_cluster_is_not_cleared_by_fewer_nodes() -> None:
    slow = judge(slow_world(1.5))
    assert [(item.nodes, item.over_nodes) for item in slow.open_failures()] == [((), 2)]
    one = dataclasses.replace(gpu_run(1), collectives=gpu_run(2).collectives)
    assert judge(one, open_failures=slow.open_failures()).verdict == "FAIL"
    assert judge(gpu_run(2), open_failures=slow.open_failures()).verdict == "PASS"


def test_a_hang_is_not_cleared_by_a_run_that_leaves_out_its_phase() -> None:
    hang = Hang(rank=9, node=1, phase="pairs", op="send_recv", sequence=3, waited_s=30)
    sick = judge(dataclasses.replace(gpu_run(), hangs=(hang,)))
    part = dataclasses.replace(gpu_run(), phases=gpu_run().phases[:2])
    few = checks.select(only=["versions", "mesh"])
    assert judge(part, checks=few, open_failures=sick.open_failures()).verdict == "FAIL"
    assert judge(gpu_run(), open_failures=sick.open_failures()).verdict == "PASS"


def test_the_busbw_for_estimates_is_all_reduces_at_its_largest_size() -> None:
    result = judge(gpu_run())
    assert result.busbw_gbytes_per_s == pytest.approx(480 / 2 * 30 / 16)
    assert {fit.op for fit in result.fits} >= {"all_reduce", "broadcast"}


def test_two_nodes_of_one_name_can_be_told_apart() -> None:
    run = gpu_run(2, 1)
    same = dataclasses.replace(run, facts=(facts(0, 1, hostname="x"), facts(1, 1, hostname="x")))
    assert judge(same).nodes == ("x (node 0)", "x (node 1)")


def test_a_plain_socket_network_has_a_threshold_by_its_line_rate() -> None:
    nic = (Nic(name="eth0", addresses=("10.0.0.1",), gbps=10.0, up=True),)
    run = cpu_run(4)
    told = tuple(dataclasses.replace(fact, nics=nic, instance_type=None) for fact in run.facts)
    slow = tuple(
        dataclasses.replace(pair, gbytes_per_s=0.5, bytes=GIB) for pair in Cluster(nodes=4).first_pass()
    )
    result = judge(dataclasses.replace(run, facts=told, pairs=slow))
    assert {fault.code for fault in result.findings} == {"slow-undecided"}
    assert "the network as a whole" in result.findings[0].title
