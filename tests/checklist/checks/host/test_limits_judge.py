"""Judging of container limits: throttled CPUs, little memory, less than peers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Counters, Local, Measurements
from checklist.registry import select
from checklist.verdict import judge
from tests.checklist.runs import all_with, cpu_run, gpu_run, with_facts

ONLY = select(only=["host-limits"])


def equal(nodes: int = 4, gpus: int = 1) -> Measurements:
    return all_with(gpu_run(nodes, gpus), cpus=16.0, memory_bytes=64 << 30)


def reported_faults(run: Measurements) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(fault.code, fault.verdict, fault.suspects) for fault in judge(run, checks=ONLY).findings]


def test_equal_nodes_with_enough_pass() -> None:
    result = judge(equal(), checks=ONLY)
    assert result.findings == ()
    assert result.check("host-limits").reason == "At least 16 CPUs and 64.0 GiB of memory on each node."  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"cpus": 12.0}, "cpu-limit"),
        ({"memory_bytes": 40 << 30}, "memory-limit"),
    ],
)
def test_a_node_with_less_than_its_peers_gives_a_warning(changes: dict[str, Any], code: str) -> None:
    assert reported_faults(with_facts(equal(), 2, **changes)) == [(code, "WARN", ("host-2",))]
    assert reported_faults(with_facts(equal(2), 1, **changes)) == [], (
        "with two GPUs the correct one is unknown"
    )


def test_each_rank_needs_one_cpu_and_one_gibibyte() -> None:
    small = all_with(cpu_run(2), cpus=0.6, memory_bytes=250 << 20)
    assert [code for code, _, _ in reported_faults(small)] == ["cpu-limit", "memory-limit"] * 2
    assert reported_faults(all_with(cpu_run(2), cpus=1.0, memory_bytes=1 << 30)) == []


@pytest.mark.parametrize(("throttled", "warns"), [(25, True), (24, False)])
def test_cpu_throttling_in_a_quarter_of_the_periods_gives_a_warning(throttled: int, warns: bool) -> None:
    counted = (
        Counters(node=1, phase="world", cpu_periods=100, cpu_throttled=2),
        Counters(node=1, phase="node", cpu_periods=100, cpu_throttled=throttled),
        Counters(node=2, phase="node", cpu_periods=9, cpu_throttled=9),
    )
    run = dataclasses.replace(equal(), counters=counted)
    assert reported_faults(run) == ([("cpu-throttled", "WARN", ("host-1",))] if warns else [])


@pytest.mark.parametrize(
    ("load_of_peers", "load", "warns"),
    [(0.1, 0.5, True), (0.1, 0.49, False), (0.3, 0.59, False), (0.3, 0.6, True)],
)
def test_cpus_that_were_busy_before_the_checks_give_a_warning(
    load_of_peers: float, load: float, warns: bool
) -> None:
    run = with_facts(all_with(equal(), load_per_cpu=load_of_peers), 1, load_per_cpu=load)
    assert reported_faults(run) == ([("cpu-busy", "WARN", ("host-1",))] if warns else [])
    assert (
        reported_faults(with_facts(all_with(equal(2), load_per_cpu=load_of_peers), 1, load_per_cpu=load))
        == []
    )


@pytest.mark.parametrize(("gbytes_per_s", "warns"), [(79.9, True), (80.0, False)])
def test_host_memory_slower_than_that_of_peers_gives_a_warning_on_gpu_nodes(
    gbytes_per_s: float, warns: bool
) -> None:
    copies = [
        Local(rank=rank, what="memory_copy", value=gbytes_per_s if rank == 2 else 100.0, unit="GB/s")
        for rank in range(4)
    ]
    run = equal()
    run = dataclasses.replace(run, locals=(*run.locals, *copies))
    assert reported_faults(run) == ([("memory-slow", "WARN", ("host-2",))] if warns else [])
    assert reported_faults(dataclasses.replace(run, device="cpu")) == [], "it depends on what else runs"
    hbm = judge(run).check("hbm")
    assert {figure.name for figure in hbm.figures} == {"hbm_copy"}  # type: ignore[union-attr]


def test_unknown_limits_have_no_verdict() -> None:
    unknown = all_with(gpu_run(2), cpus=None, memory_bytes=None)
    assert judge(unknown, checks=ONLY).check("host-limits").verdict == "NO-VERDICT"  # type: ignore[union-attr]
