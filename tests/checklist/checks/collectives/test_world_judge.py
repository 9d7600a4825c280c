"""Judging of collectives over all ranks: wrong values, bandwidth and transport."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from checklist.judging import thresholds
from checklist.measurements import Local
from checklist.verdict import judge
from tests.checklist.runs import codes, gpu_run, records_of_runs, slow_world, verdict_of


def test_a_network_of_unknown_rate_is_judged_only_by_its_history() -> None:
    first = judge(slow_world(1.0, gpus=4))
    assert verdict_of(first, "bandwidth") == first.verdict == "NO-VERDICT"
    assert first.headline.startswith("Software works; speed not judged")
    assert "--expect" in first.headline
    assert first.healthy_nodes == first.nodes
    past = records_of_runs(first)
    assert codes(slow_world(1.2, gpus=4), history=past) == {"below-history": "FAIL"}
    repetitions = judge(slow_world(1.0, gpus=4), history=past)
    assert (repetitions.findings, repetitions.verdict) == ((), "NO-VERDICT"), "it may always have been slow"


def test_the_users_expectation_judges_a_network_of_unknown_rate() -> None:
    figure = 480 / 2 * 2 * 7 / 8  # slow_world's busbw with 8 ranks
    assert judge(slow_world(1.0, gpus=4), expect=figure).verdict == "PASS"
    assert codes(slow_world(1.0, gpus=4), expect=1.1 * figure) == {"below-expected": "WARN"}
    assert codes(slow_world(1.0, gpus=4), expect=2 * figure) == {"half-speed": "FAIL"}


def test_a_threshold_of_the_user_applies_by_system_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("system,op,floor,source\nour cluster,all_reduce,470,acceptance test\n")
    table = thresholds.table(file)
    assert codes(slow_world(1.0, gpus=4), thresholds=table) == {}
    result = judge(slow_world(1.2, gpus=4), thresholds=table, system="Our cluster")
    assert [fault.code for fault in result.findings] == ["below-floor"]


def test_wrong_values_fail_without_naming_a_node() -> None:
    run = gpu_run(4)
    wrong = dataclasses.replace(run.collectives[0], correct=False, wrong_values=7, wrong_ranks=(3,))
    result = judge(dataclasses.replace(run, collectives=(wrong, *run.collectives[1:])))
    assert [fault.code for fault in result.findings] == ["wrong-values"]
    assert "7 wrong values on rank 3" in result.headline
    assert result.bad_nodes == ()
    assert "host-0" not in result.healthy_nodes


def test_an_operation_whose_values_were_not_compared_is_not_a_pass() -> None:
    run = gpu_run()
    left_out = tuple(item for item in run.collectives if item.op != "scatter")
    assert verdict_of(judge(dataclasses.replace(run, collectives=left_out)), "correctness") == "NO-VERDICT"


def test_a_topology_file_is_suspected_if_collectives_are_slow_and_gpu_copies_are_not() -> None:
    slow = dataclasses.replace(slow_world(2.0), environment={"NCCL_TOPO_FILE": "/opt/other.xml"})
    (fault,) = judge(slow).findings
    assert (fault.code, fault.verdict) == ("topology-file", "FAIL")
    assert "/opt/other.xml" in fault.advice[0]
    copies = tuple(Local(rank=r, what="peer_copy", value=100.0, unit="GB/s", peer=r ^ 1) for r in range(16))
    both = dataclasses.replace(slow, locals=(*slow.locals, *copies))
    assert codes(both) == {"peer-copy-slow": "FAIL", "half-speed": "FAIL"}
