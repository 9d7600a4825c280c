"""Thirty nights, each judged with the history of the nights before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from checklist import past_runs
from checklist.analysis.baseline import DAY_S, STEADY_NIGHTS
from checklist.judging.thresholds import Table
from checklist.measurements import Measurements
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, verdict_of, with_facts, with_pairs, with_share

NIGHTS = 30


def nights_of(
    place: Path, change: Callable[[int], Measurements], count: int = 8, accept: int | None = None
) -> list[Result]:
    """Judge the run of each night by the history of the nights before, without thresholds."""
    results = []
    for night in range(count):
        past = past_runs.read(place)
        results.append(
            judge(
                dataclasses.replace(change(night), started_unix=night * DAY_S),
                thresholds=Table(()),
                history=past.records,
                open_failures=past.open_failures,
                accept_baseline=night == accept,
            )
        )
        past_runs.append(results[-1], place)
    return results


def nights(
    place: Path, share: Callable[[int], float], *, late_clock: bool = False, accept: int | None = None
) -> list[Result]:
    """Simulate thirty nights with all GPUs at a share of their first measurement."""

    def change(night: int) -> Measurements:
        run = with_share(gpu_run(), share(night))
        return with_facts(run, 8, clock_offset_s=30.0) if late_clock else run

    return nights_of(place, change, NIGHTS, accept)


def reported(result: Result) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(fault.check, fault.verdict, fault.nodes or fault.suspects) for fault in result.findings]


SIX = gpu_run(6, 1)


def test_a_gpu_slower_than_its_own_history_is_named_even_if_it_matches_its_peers(
    tmp_path: Path,
) -> None:
    def change(night: int) -> Measurements:
        return with_share(SIX, 1.09 * (1.0 if night < 5 else 0.93 if night < 7 else 0.89), [3])

    results = nights_of(tmp_path / "h.jsonl", change)
    assert [reported(result) for result in results[3:]] == [
        *([[]] * 2),
        *([[("gemm", "WARN", ("host-3",)), ("hbm", "WARN", ("host-3",))]] * 2),
        [("gemm", "FAIL", ("host-3",)), ("hbm", "FAIL", ("host-3",))],
    ]
    assert "worse than in earlier runs" in results[5].findings[0].title


def test_a_gpu_at_a_new_steady_level_gets_it_as_its_baseline(tmp_path: Path) -> None:
    def change(night: int) -> Measurements:
        return with_share(SIX, 1.05 if night < 4 else 1.05 * 0.93, [3])

    results = nights_of(tmp_path / "h.jsonl", change, 4 + STEADY_NIGHTS + 2)
    assert ["".join(verdict_of(result, "hbm")[0]) for result in results] == [
        *"PPPP",
        *("W" * STEADY_NIGHTS),
        *"PP",
    ]
    reported = {night: result.notes for night, result in enumerate(results) if result.notes}
    assert list(reported) == [3 + STEADY_NIGHTS]
    assert "hbm_copy of host-3 GPU-3-0: 5 steady nights at 2783 GB/s are the new baseline" in reported[8][1]


def verdict_letters(results: list[Result]) -> str:
    """Return the first letter of the verdict on matrix products for each night."""
    return "".join(verdict_of(result, "gemm")[0] for result in results)


def test_a_permanent_warning_does_not_prevent_a_history_of_measurements(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 if night < 20 else 0.85, late_clock=True)
    assert {result.verdict for result in results[:20]} == {"WARN"}
    assert verdict_letters(results) == "P" * 20 + "F" * 10
    assert any("worse than in earlier runs" in fault.title for fault in results[20].findings)


def test_a_steady_drop_of_seven_percent_warns_and_then_becomes_the_new_baseline(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 if night < 12 else 0.93)
    assert verdict_letters(results) == "P" * 12 + "W" * STEADY_NIGHTS + "P" * (18 - STEADY_NIGHTS)
    reported = {night: result.notes for night, result in enumerate(results) if result.notes}
    assert list(reported) == [11 + STEADY_NIGHTS]
    assert (
        reported[16][0] == "gemm_bf16: 5 steady nights at 706.8 TFLOPS are the new baseline, instead of 760."
    )


def test_a_drift_of_one_percent_per_night_warns_then_fails_and_never_becomes_the_baseline(
    tmp_path: Path,
) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 0.99 ** max(0, night - 9))
    letters = verdict_letters(results)
    first_warning, first_failure = letters.index("W"), letters.index("F")
    assert letters == "P" * first_warning + "W" * (first_failure - first_warning) + "F" * (30 - first_failure)
    assert (first_warning, first_failure) == (15, 20), "5 % and 10 % below what it was on night 9"
    assert all(result.notes == () for result in results)


def test_a_change_of_fifteen_percent_fails_until_it_is_accepted(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 if night < 10 else 0.85, accept=20)
    assert verdict_letters(results) == "P" * 10 + "F" * 10 + "P" * 10
    assert "--accept-baseline" in results[20].notes[0]
    assert all(record.accepted for record in results[20].records)
    assert results[20].open_failures() == ()


def test_a_node_whose_network_drops_to_85_percent_of_its_history_gives_a_warning(tmp_path: Path) -> None:
    """Its network card was faster than others, so compared with peers it still looks healthy."""

    def change(night: int) -> Measurements:
        best = 54 if night < 6 else 54 * 0.85
        return with_pairs(SIX, Cluster(nodes=6, path=lambda a, b: best if 2 in (a, b) else 45))

    results = nights_of(tmp_path / "h.jsonl", change)
    assert {verdict_of(result, "pairs") for result in results[:6]} == {"WARN"}, "uneven: one is faster"
    assert [reported(result) for result in results[6:]] == [[("pairs", "WARN", ("host-2",))] * 2] * 2
    assert "host-2 sends" in results[6].findings[0].title


def test_a_pair_slower_than_its_own_history_warns_on_the_third_night(tmp_path: Path) -> None:
    def change(night: int) -> Measurements:
        slow = {(1, 4): 0.7} if night == 3 else {(1, 4): 0.9} if night >= 5 else {}
        fast = Cluster(nodes=6, speed=45, path=lambda a, b: 49 if (a, b) == (1, 4) else 45, links=slow)
        return with_pairs(SIX, fast, again=night != 3)

    results = nights_of(tmp_path / "h.jsonl", change)
    assert reported(results[5]) == reported(results[6]) == []
    assert reported(results[7]) == [("pairs", "WARN", ("host-1", "host-4"))]
    assert "3 times in a row" in results[7].headline
