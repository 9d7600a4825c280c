"""Thirty nights, each judged with what the ones before it have left: what is said each night."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from checklist import past_runs
from checklist.analysis.baseline import DAY_S, STEADY_NIGHTS
from checklist.judges.thresholds import Table
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, spoil, verdict_of

NIGHTS = 30


def nights(
    place: Path, share: Callable[[int], float], *, late_clock: bool = False, accept: int | None = None
) -> list[Result]:
    """All GPUs of each night's run at that share of what they had in the first; by a file's history."""
    results = []
    for night in range(NIGHTS):
        run = gpu_run(started_unix=night * DAY_S)
        locals_ = tuple(dataclasses.replace(x, value=float(x.value or 0) * share(night)) for x in run.locals)
        run = dataclasses.replace(run, locals=locals_)
        past = past_runs.read(place)
        results.append(
            judge(
                spoil(run, 8, clock_offset_s=30.0) if late_clock else run,
                thresholds=Table(()),
                history=past.records,
                open_failures=past.open_failures,
                accept_baseline=night == accept,
            )
        )
        past_runs.keep(results[-1], place)
    return results


def said(results: list[Result]) -> str:
    """Of each night, the first letter of what is said of the matrix products."""
    return "".join(verdict_of(result, "gemm")[0] for result in results)


def test_a_permanent_warning_does_not_keep_figures_from_having_a_history(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 if night < 20 else 0.85, late_clock=True)
    assert {result.verdict for result in results[:20]} == {"WARN"}
    assert said(results) == "P" * 20 + "F" * 10
    assert any("worse than its past" in fault.title for fault in results[20].findings)


def test_a_lawful_step_of_seven_percent_warns_and_is_then_the_new_baseline(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 if night < 12 else 0.93)
    assert said(results) == "P" * 12 + "W" * STEADY_NIGHTS + "P" * (18 - STEADY_NIGHTS)
    told = {night: result.notes for night, result in enumerate(results) if result.notes}
    assert list(told) == [11 + STEADY_NIGHTS]
    assert told[16][0] == "gemm_bf16: 5 steady nights at 706.8 TFLOPS are the new baseline, instead of 760."


def test_a_drift_of_one_percent_a_night_warns_then_fails_and_is_never_taken_for_normal(
    tmp_path: Path,
) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 0.99 ** max(0, night - 9))
    letters = said(results)
    first_warning, first_failure = letters.index("W"), letters.index("F")
    assert letters == "P" * first_warning + "W" * (first_failure - first_warning) + "F" * (30 - first_failure)
    assert (first_warning, first_failure) == (15, 20), "5 % and 10 % below what it was on night 9"
    assert all(result.notes == () for result in results)


def test_a_change_of_fifteen_percent_fails_until_somebody_accepts_it(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 if night < 10 else 0.85, accept=20)
    assert said(results) == "P" * 10 + "F" * 10 + "P" * 10
    assert "--accept-baseline" in results[20].notes[0]
    assert all(record.accepted for record in results[20].records)
    assert results[20].open_failures() == ()


def test_steady_nights_say_nothing(tmp_path: Path) -> None:
    results = nights(tmp_path / "h.jsonl", lambda night: 1.0 + 0.004 * (night % 3))
    assert (said(results), {result.verdict for result in results}) == ("P" * NIGHTS, {"PASS"})
