"""Baselines: a measurement is compared only with passed runs in the same environment."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.analysis.baseline import (
    DAY_S,
    Record,
    Setting,
    compare_with_past,
    setting_of,
)
from tests.checklist.runs import gpu_run

HERE = Setting(
    hardware="p5.48xlarge, NVIDIA H100 80GB HBM3",
    driver="570.1",
    library="nccl 2.27.3",
    image="train:1",
    nodes=2,
    ranks=16,
)
SIZE = 2**33


def past_records(
    *values: float, setting: Setting = HERE, verdict: Any = "PASS", start: float = 0
) -> list[Record]:
    return [
        Record(
            unix=start + number,
            verdict=verdict,
            setting=setting,
            op="all_reduce",
            bytes=SIZE,
            value=value,
            unit="GB/s",
        )
        for number, value in enumerate(values)
    ]


def verdict(records: list[Record], value: float, setting: Setting = HERE) -> str | None:
    verdict_of_past = compare_with_past(records, setting, "all_reduce", SIZE, value)
    return None if verdict_of_past is None else verdict_of_past.verdict


def test_a_slower_barrier_fails_against_its_baseline() -> None:
    times = [
        dataclasses.replace(record, op="barrier", bytes=0, value=70e-6) for record in past_records(1, 1, 1)
    ]
    slow = compare_with_past(times, HERE, "barrier", 0, 90e-6, less_is_better=True)
    fast = compare_with_past(times, HERE, "barrier", 0, 60e-6, less_is_better=True)
    assert (slow.verdict, fast.verdict) == ("FAIL", "PASS")


def test_only_passed_runs_count_for_a_baseline() -> None:
    """Otherwise a slow decline would become the baseline."""
    sick = past_records(100, 100, 100, verdict="FAIL", start=10) + past_records(
        100, 100, verdict="WARN", start=20
    )
    assert verdict(sick, 100) is None
    assert verdict(past_records(480, 480, 480) + sick, 100) == "FAIL"


@pytest.mark.parametrize("field", ["hardware", "driver", "library", "image", "nodes", "ranks"])
def test_a_change_of_the_environment_starts_a_new_baseline(field: str) -> None:
    value: Any = 3 if field in ("nodes", "ranks") else "new"
    assert verdict(past_records(480, 480, 480), 100, dataclasses.replace(HERE, **{field: value})) is None


def test_a_baseline_applies_only_to_its_message_size_and_operation() -> None:
    assert compare_with_past(past_records(480, 480, 480), HERE, "all_reduce", SIZE // 2, 100) is None
    assert compare_with_past(past_records(480, 480, 480), HERE, "broadcast", SIZE, 100) is None


def nights(*values: float, level: Any = "PASS") -> list[Record]:
    return [
        dataclasses.replace(record, unix=DAY_S * n)
        for n, record in enumerate(past_records(*values, verdict=level))
    ]


def test_unsteady_or_failed_nights_do_not_become_a_new_baseline() -> None:
    scattered = nights(*[480.0] * 10, 440, 452, 440, 452, 440, 452)
    assert verdict(scattered, 446) == "WARN"
    failed = [
        dataclasses.replace(r, verdict="FAIL") if r.value < 430 else r
        for r in nights(*[480.0] * 10, *[420.0] * 9)
    ]
    assert verdict(failed, 420) == "FAIL"
    one_day = past_records(*[480.0] * 10) + past_records(*[446.0] * 9, start=100)
    assert verdict(one_day, 446) == "WARN", "many runs of one day are one night"


def test_a_value_within_its_usual_variation_passes() -> None:
    assert verdict(past_records(400, 480, 520, 430, 500), 420) == "PASS"
    assert verdict(past_records(400, 480, 520, 430, 500), 200) == "FAIL"


def test_the_environment_of_a_run_is_read_from_its_facts() -> None:
    assert setting_of(gpu_run()) == dataclasses.replace(HERE, image=None)
