"""Verdicts from measurements: unmeasured checks do not pass, and rules for clearing earlier failures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist import registry
from checklist.measurements import Hang, Measurements, Pair, Phase
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, facts, gpu_run, slow_world, verdict_of, with_pairs


@pytest.mark.parametrize("nodes", [2, 4, 33])
def test_a_healthy_cluster_passes_with_all_its_nodes(nodes: int) -> None:
    result = judge(gpu_run(nodes))
    assert (result.verdict, result.findings, result.bad_nodes) == ("PASS", (), ())
    assert result.healthy_nodes == result.nodes
    assert len(result.nodes) == nodes


def test_nodes_on_one_machine_pass_without_a_statement_about_the_network() -> None:
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


def test_pairs_compared_only_with_each_other_pass_with_a_note_on_speed() -> None:
    result = judge(cpu_run(6), checks=registry.select(only=["pairs"]))
    assert result.verdict == "PASS"
    assert result.headline.startswith("No fault found; speed not judged: the expected speed")


def test_a_run_without_measurements_has_no_verdict_and_no_healthy_nodes() -> None:
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
    assert (result.verdict, result.exit_code) == ("NO-VERDICT", 3)
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


def test_a_check_that_was_not_selected_does_not_count() -> None:
    run = dataclasses.replace(gpu_run(), pairs=(), collectives=())
    result = judge(run, checks=registry.select(only=["mesh", "ranks"]))
    assert result.verdict == "PASS"
    assert {"pairs", "bandwidth"} <= {item.check for item in result.skipped}


def test_a_phase_that_ended_early_without_a_known_cause_gives_no_verdict() -> None:
    failed = (Phase(name="pairs", status="failed", reason="timed out"),)
    result = judge(dataclasses.replace(gpu_run(), pairs=(), phases=failed))
    assert result.verdict == "NO-VERDICT"
    assert "pairs" in result.headline


def rerun(earlier: Result, **changes: Any) -> Result:
    return judge(gpu_run(4, **changes), open_failures=earlier.open_failures())


def test_a_failure_is_cleared_only_by_an_equally_strict_check_of_that_node() -> None:
    sick = judge(with_pairs(gpu_run(4), Cluster(nodes=4, transmit={2: 0.25}, receive={2: 0.25})))
    assert [item.nodes for item in sick.open_failures()] == [("host-2",)]

    weaker = rerun(sick, profile="quick")
    assert (weaker.verdict, weaker.bad_nodes) == ("FAIL", ("host-2",))
    assert "Still open from an earlier run" in weaker.headline
    assert "host-2" not in weaker.healthy_nodes

    unmeasured = judge(dataclasses.replace(gpu_run(4), pairs=()), open_failures=sick.open_failures())
    assert unmeasured.bad_nodes == ("host-2",)

    other_facts = tuple(fact for fact in gpu_run(4).facts if fact.node != 2)
    elsewhere = judge(gpu_run(2), open_failures=sick.open_failures())
    assert other_facts
    assert elsewhere.verdict == "PASS", "the sick node does not take part"
    assert elsewhere.bad_nodes == ("host-2",)
    assert elsewhere.open_failures() == sick.open_failures()

    for profile in ("standard", "deep"):
        cured = rerun(sick, profile=profile)
        assert (cured.verdict, cured.bad_nodes, cured.open_failures()) == ("PASS", (), ())


def test_a_cluster_wide_failure_is_not_cleared_by_a_run_with_fewer_nodes() -> None:
    slow = judge(slow_world(2.0))
    assert [(item.nodes, item.over_nodes) for item in slow.open_failures()] == [((), 2)]
    one = dataclasses.replace(gpu_run(1), collectives=gpu_run(2).collectives)
    assert judge(one, open_failures=slow.open_failures()).verdict == "FAIL"
    assert judge(gpu_run(2), open_failures=slow.open_failures()).verdict == "PASS"


def test_a_hang_is_not_cleared_by_a_run_without_its_phase() -> None:
    hang = Hang(rank=9, node=1, phase="pairs", op="send_recv", sequence=3, waited_s=30)
    sick = judge(dataclasses.replace(gpu_run(), hangs=(hang,)))
    part = dataclasses.replace(gpu_run(), phases=gpu_run().phases[:2])
    two_checks = registry.select(only=["versions", "mesh"])
    assert judge(part, checks=two_checks, open_failures=sick.open_failures()).verdict == "FAIL"
    assert judge(gpu_run(), open_failures=sick.open_failures()).verdict == "PASS"


def test_the_busbw_for_estimates_is_that_of_all_reduce_at_its_largest_size() -> None:
    result = judge(gpu_run())
    assert result.busbw_gbytes_per_s == pytest.approx(480 / 2 * 30 / 16)
    assert {fit.op for fit in result.fits} >= {"all_reduce", "broadcast"}


def test_two_nodes_with_the_same_name_are_distinguished() -> None:
    run = gpu_run(2, 1)
    same = dataclasses.replace(run, facts=(facts(0, 1, hostname="x"), facts(1, 1, hostname="x")))
    assert judge(same).nodes == ("x (node 0)", "x (node 1)")
