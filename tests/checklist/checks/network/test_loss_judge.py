"""Intermittent packet loss over successive nights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from checklist import past_runs
from checklist.measurements import Counters, Measurements
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.runs import cpu_run, verdict_of

DAY = 86_400.0


def night(number: int, stalled: tuple[tuple[int, int], ...] = (), nodes: int = 4) -> Measurements:
    """Return a run of that night in which some messages stalled for three seconds, but not alone."""
    size = 1 << 24
    pairs = tuple(
        dataclasses.replace(
            pair,
            gbytes_per_s=1.0,
            gbytes_per_s_p95=0.005 if (pair.src, pair.dst) in stalled else 0.95,
            bytes=size if (pair.src, pair.dst) not in stalled else size * 2,
            segments=10_000,
            retransmitted=3,
        )
        for pair in cpu_run(nodes).pairs
    )
    repetitions = tuple(
        dataclasses.replace(pair, gbytes_per_s_p95=0.95, alone=True)
        for pair in pairs
        if (pair.src, pair.dst) in stalled
    )
    return cpu_run(nodes, started_unix=number * DAY, pairs=(*pairs, *repetitions), collectives=())


def nights(place: Path, runs: list[Measurements]) -> list[Result]:
    """Judge each night with the history of the nights before."""
    results = []
    for run in runs:
        past = past_runs.read(place)
        results.append(
            judge(run, history=past.records, open_failures=past.open_failures, sightings=past.sightings)
        )
        past_runs.append(results[-1], place)
    return results


def reported_faults(result: Result) -> list[tuple[str, str]]:
    return [(fault.code, fault.verdict) for fault in result.findings if fault.check == "loss"]


def test_a_flapping_link_warns_twice_then_fails_until_it_was_absent_for_long(
    tmp_path: Path,
) -> None:
    bad = {2: (1, 3), 5: (3, 1), 9: (1, 3)}
    runs = [night(n, (bad[n],) if n in bad else ()) for n in range(30)]
    results = nights(tmp_path / "history.jsonl", runs)
    once, recurring_faults = [("loss-intermittent", "WARN")], [("loss-recurring", "FAIL")]
    reported = [reported_faults(result) for result in results]
    assert (reported[:2], reported[2:9], reported[9]) == (
        [[], []],
        [once, [], [], once, [], [], []],
        [*recurring_faults, *once],
    )
    assert reported[10:16] == [recurring_faults] * 6, "it is not cleared by being away"
    assert reported[16:] == [[]] * 14, "the first of three nights is more than 14 days ago"
    assert "Seen on 2 of 6 nights (1970-01-03, 1970-01-06)." in results[5].findings[0].title
    assert results[12].findings[0].title == (
        "The link between host-1 and host-3 loses packets again and again: seen on 3 of 13 nights "
        "(1970-01-03, 1970-01-06, 1970-01-10)."
    )
    assert {result.bad_nodes for result in results} == {()}, "a link is neither end's fault"
    assert [verdict_of(results[n], "loss") for n in (1, 2, 9, 12, 20)] == [
        "PASS",
        "WARN",
        "FAIL",
        "FAIL",
        "PASS",
    ]
    assert results[20].open_failures() == ()


def test_a_node_seen_with_different_partners_each_night_is_at_fault(tmp_path: Path) -> None:
    runs = [night(n, (pair,)) for n, pair in enumerate([(2, 0), (1, 2), (2, 3)])]
    results = nights(tmp_path / "history.jsonl", runs)
    assert [result.bad_nodes for result in results] == [(), (), ("host-2",)]
    away = judge(night(3, nodes=2), sightings=past_runs.read(tmp_path / "history.jsonl").sightings)
    assert reported_faults(away) == [], "the node does not take part"


def test_a_carrier_lost_on_three_nights_remains_a_failure(tmp_path: Path) -> None:
    lost = Counters(node=1, phase="pairs", carrier_changes=2)
    runs = [dataclasses.replace(night(n), counters=(lost,)) for n in range(3)]
    results = nights(tmp_path / "history.jsonl", [*runs, night(3)])
    assert reported_faults(results[3]) == [("loss-recurring", "FAIL")]
    assert results[3].bad_nodes == ("host-1",)


def test_a_lasting_fault_is_not_recorded_as_intermittent() -> None:
    lossy = tuple(
        dataclasses.replace(pair, retransmitted=300, alone=alone)
        for pair in night(1).pairs
        if pair.src == 2
        for alone in (False, True)
    )
    result = judge(dataclasses.replace(night(1), pairs=(*night(1).pairs, *lossy)))
    sightings = past_runs.run_of(result).look
    assert reported_faults(result) == [("loss-node", "FAIL")]
    assert (sightings.nodes, sightings.seen) == (result.nodes, ())


def test_single_machines_and_runs_without_pairs_count_as_no_observation() -> None:
    assert past_runs.run_of(judge(cpu_run(2, local=True))).look is None
    assert past_runs.run_of(judge(cpu_run(4, pairs=()))).look is None
