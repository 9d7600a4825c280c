"""Containers that hold their ranks up: throttled CPUs, little memory, less than their peers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Counters, Measurements
from checklist.registry import select
from checklist.verdict import judge
from tests.checklist.runs import all_with, cpu_run, gpu_run, spoil

ONLY = select(only=["host-limits"])


def equal(nodes: int = 4, gpus: int = 1) -> Measurements:
    return all_with(gpu_run(nodes, gpus), cpus=16.0, memory_bytes=64 << 30)


def found(run: Measurements) -> list[tuple[str, str, tuple[str, ...]]]:
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
def test_a_node_with_less_than_its_peers_warns(changes: dict[str, Any], code: str) -> None:
    assert found(spoil(equal(), 2, **changes)) == [(code, "WARN", ("host-2",))]
    assert found(spoil(equal(2), 1, **changes)) == [], "of two nobody can say which is right"


def test_a_rank_needs_a_cpu_and_a_gibibyte() -> None:
    small = all_with(cpu_run(2), cpus=0.6, memory_bytes=250 << 20)
    assert [code for code, _, _ in found(small)] == ["cpu-limit", "memory-limit"] * 2


@pytest.mark.parametrize(("throttled", "says"), [(25, True), (24, False)])
def test_a_quota_that_is_used_up_in_a_quarter_of_the_time_warns(throttled: int, says: bool) -> None:
    counted = (
        Counters(node=1, phase="world", cpu_periods=100, cpu_throttled=2),
        Counters(node=1, phase="node", cpu_periods=100, cpu_throttled=throttled),
        Counters(node=2, phase="node", cpu_periods=9, cpu_throttled=9),
    )
    run = dataclasses.replace(equal(), counters=counted)
    assert found(run) == ([("cpu-throttled", "WARN", ("host-1",))] if says else [])


def test_unknown_limits_have_no_verdict() -> None:
    unknown = all_with(gpu_run(2), cpus=None, memory_bytes=None)
    assert judge(unknown, checks=ONLY).check("host-limits").verdict == "NO-VERDICT"  # type: ignore[union-attr]
