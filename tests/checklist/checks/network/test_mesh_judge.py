"""Judging of round trips between nodes and of connection retries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from checklist.measurements import Measurements, Probe
from checklist.registry import select
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, records_of_runs

ONLY = select(only=["mesh"])


def changed(nodes: int, change: Callable[[Probe], Probe], **facts: object) -> Measurements:
    run = gpu_run(nodes, 1)
    probes = tuple(change(dataclasses.replace(probe, round_trip_s=2e-4)) for probe in run.probes)
    reported = tuple(dataclasses.replace(fact, **facts) for fact in run.facts)  # type: ignore[arg-type]
    return dataclasses.replace(run, probes=probes, facts=reported)


def slow(*nodes: int, seconds: float = 5e-3) -> Callable[[Probe], Probe]:
    return lambda probe: (
        dataclasses.replace(probe, round_trip_s=seconds) if {probe.src, probe.dst} & set(nodes) else probe
    )


def titles(run: Measurements, **changes: object) -> list[str]:
    return [fault.title for fault in judge(run, checks=ONLY, **changes).findings]  # type: ignore[arg-type]


def test_equal_round_trips_pass_and_are_shown() -> None:
    result = judge(changed(4, lambda probe: probe), checks=ONLY)
    assert result.findings == ()
    figures = {figure.name: figure.value for figure in result.check("mesh").figures}  # type: ignore[union-attr]
    assert figures["round trip, median"] == 2e-4


def test_a_node_with_long_round_trips_to_all_others_is_a_suspect() -> None:
    (fault,) = judge(changed(6, slow(3)), checks=ONLY).findings
    assert (fault.code, fault.verdict, fault.suspects) == ("latency-high", "WARN", ("host-3",))
    assert "5 ms" in fault.title


def test_one_late_round_trip_or_a_difference_below_two_milliseconds_gives_no_finding() -> None:
    assert titles(changed(6, lambda p: slow(3)(p) if (p.src, p.dst) != (3, 1) else p)) == []
    assert titles(changed(6, slow(3, seconds=2e-3))) == []


@pytest.mark.parametrize(("zone", "warns"), [("us-east-1a", True), (None, False)])
def test_long_round_trips_within_one_zone_give_a_warning(zone: str | None, warns: bool) -> None:
    run = changed(4, lambda probe: dataclasses.replace(probe, round_trip_s=5e-3), zone=zone)
    assert [("within one zone" in title) for title in titles(run)] == ([True] if warns else [])


def test_round_trips_twice_as_long_as_in_earlier_runs_give_a_warning() -> None:
    past = records_of_runs(judge(changed(4, lambda probe: probe), checks=ONLY))
    (title,) = titles(changed(4, lambda probe: dataclasses.replace(probe, round_trip_s=8e-4)), history=past)
    assert "0.2 ms in earlier runs" in title
    assert titles(changed(4, lambda probe: dataclasses.replace(probe, round_trip_s=3e-4)), history=past) == []


def retried(nodes: int, which: Callable[[Probe], bool]) -> Measurements:
    return changed(nodes, lambda probe: dataclasses.replace(probe, tries=2) if which(probe) else probe)


def test_connection_retries_of_one_node_are_reported_with_the_paths() -> None:
    (fault,) = judge(retried(8, lambda p: p.dst == 2 and p.src < 6), checks=ONLY).findings
    assert (fault.code, fault.verdict, fault.suspects) == ("second-try", "WARN", ("host-2",))
    assert "5 of 56 connections" in fault.title
    assert "host-0 > host-2" in fault.title


def test_connection_retries_between_two_racks_name_the_racks() -> None:
    run = retried(8, lambda probe: probe.src < 4 <= probe.dst)
    racks = tuple(
        dataclasses.replace(fact, network_nodes=("spine", f"rack-{fact.node // 4}", f"host-{fact.node}"))
        for fact in run.facts
    )
    (title,) = titles(dataclasses.replace(run, facts=racks))
    assert "between rack-0 and rack-1" in title


def test_one_of_eight_paths_that_drops_connections_is_recognized() -> None:
    (title,) = titles(retried(12, lambda p: (7 * p.src + 13 * p.dst + p.src * p.dst) % 8 == 3))
    assert "one of several paths" in title


def test_occasional_connection_retries_give_no_finding() -> None:
    assert titles(retried(16, lambda probe: (probe.src, probe.dst) in {(0, 5), (3, 9), (12, 1)})) == []
