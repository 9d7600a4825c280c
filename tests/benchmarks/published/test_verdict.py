"""Verdict on a run: accepted or refused, compared with whether it ran."""

from dataclasses import replace
from pathlib import Path

from benchmarks.published import rows, scoring
from benchmarks.published.verdict import Judged, Verdict, calibration, verdict
from estimator import memory
from estimator.risk import verdict_of
from tests.benchmarks.published.measured_tables import carried_held_out, read

CARRIED = rows.TABLE


def test_the_verdict_uses_needed_memory_instead_of_shown_memory() -> None:
    """Lengths that vary show far more than they need, where there is room."""
    row = next(row for row in rows.read(CARRIED) if row.varies and row.setup is not None)
    estimate = memory.estimate(row.setup)  # type: ignore[arg-type]
    between = (estimate.needs_bytes + estimate.shows_bytes) // 2
    (judged,) = scoring.compare_rows([replace(row, capacity_bytes=between)]).judged
    assert judged.accepted
    assert estimate.shows_bytes > between


def test_the_verdict_counts_successful_and_out_of_memory_runs_separately() -> None:
    row = rows.read(CARRIED)[0]
    ran = Judged(row=row, needs_gib=30, capacity_gib=24, risk=0.99)
    oom = Judged(row=replace(row, oom=True), needs_gib=23, capacity_gib=24, risk=0.1)
    assert ran.wrong
    assert oom.wrong
    right = replace(ran, needs_gib=20, risk=0.0)
    assert verdict([ran, oom, right]) == Verdict(ran=2, refused_of_ran=1, oom=1, accepted_of_oom=1)
    assert [(record["runs"], record["oom"]) for record in calibration([ran, oom, right])] == [
        (1, 0),
        (1, 1),
        (1, 0),
    ]


def test_fewer_than_2_percent_of_accepted_runs_of_new_sources_run_out_of_memory() -> None:
    judged = [item for item in carried_held_out().judged if verdict_of(item.risk) == "fits"]
    assert len(judged) > 700
    assert sum(item.row.oom for item in judged) <= 0.02 * len(judged)


def test_an_out_of_memory_run_is_judged_without_a_measurement(tmp_path: Path) -> None:
    row = read(tmp_path, oom="1", peak_mem_GiB="", gib_min="", gib_max="", mem_kind="", tps_per_gpu="")
    (judged,) = scoring.compare_rows([row]).judged
    assert judged.row.oom


def test_a_run_whose_checkpointing_is_not_stated_is_not_judged(tmp_path: Path) -> None:
    row = read(tmp_path, act_ckpt="", peak_mem_GiB="", gib_min="", gib_max="", mem_kind="")
    assert scoring.compare_rows([row]).judged == ()
    assert row.verdict_skip == "activation checkpointing is not stated"


def test_stated_memory_replaces_a_gpu_missing_from_the_catalogue(
    tmp_path: Path,
) -> None:
    row = read(tmp_path, gpu="a card of next year", gpu_mem_GB="128")
    assert row.capacity_bytes == 128 * 2**30


def test_a_run_with_several_rows_is_judged_once(tmp_path: Path) -> None:
    first, second = read(tmp_path), read(tmp_path, notes="same run as x1", mem_kind="allocated")
    comparison = scoring.compare_rows([first, second])
    assert [item.row for item in comparison.judged] == [first]
    assert len(comparison.memory) == 2
