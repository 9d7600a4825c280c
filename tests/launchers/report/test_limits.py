"""The limits of what is reported of a run at their edges: the limit itself, and the value next to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launchers.report import trace
from launchers.report.evaluations import HeldOutLoss, evaluations_without_gain, stops_early
from launchers.report.metrics import median
from launchers.report.state import DRAWN_EVALUATIONS, RunState
from launchers.report.stragglers import MIN_STEPS, WARM_UP, Stragglers, lags
from launchers.report.telemetry import Drawn, Pace, Straggling
from launchers.report.trackers import _flat
from launchers.report.window import Window, compare, milliseconds
from launchers.settings.sections import Evaluation

NAMED_AT = WARM_UP + MIN_STEPS


def pace(rank: int, step: int, in_collectives: float, dt: float = 1.0) -> Pace:
    return Pace(
        rank=rank,
        local_rank=rank,
        node=0,
        host="h0",
        step=step,
        dt=dt,
        in_collectives=in_collectives,
    )


def follow(lag_of_steps: Sequence[float], dt: float = 1.0) -> list[Straggling]:
    """Report two ranks, the first of which lags by those shares of its steps."""
    watch, events = Stragglers(2, 2), []
    for step, lag in enumerate([0.0] * WARM_UP + list(lag_of_steps), 1):
        events += watch.add(pace(0, step, 0.0, dt))
        events += watch.add(pace(1, step, lag * dt, dt))
    return events


@pytest.mark.parametrize(("lag", "named"), [(0.1, False), (0.101, True)])
def test_a_rank_is_late_above_a_tenth_of_the_step(lag: float, named: bool) -> None:
    assert [each.rank for each in follow([lag] * MIN_STEPS)] == [0] * named


@pytest.mark.parametrize(("late", "named"), [(13, True), (12, False)])
def test_a_rank_is_named_for_four_fifths_of_its_steps(late: int, named: bool) -> None:
    events = follow([0.5] * late + [0.0] * (MIN_STEPS - late))
    assert [each.rank for each in events] == [0] * named


def test_lags_that_scatter_as_much_as_they_weigh_name_nobody() -> None:
    assert follow([0.11, 9.0] * (MIN_STEPS // 2)) == []


@pytest.mark.parametrize(("dt", "step"), [(1.0, NAMED_AT), (0.3125, NAMED_AT), (0.3, NAMED_AT + 1)])
def test_a_rank_is_named_after_sixteen_steps_and_five_seconds(dt: float, step: int) -> None:
    (named,) = follow([0.5] * (MIN_STEPS + 1), dt)
    assert (named.step, named.since) == (step, WARM_UP + 1)
    assert named.share == pytest.approx(0.5)


@pytest.mark.parametrize(("lag", "over"), [(0.05, [False, True]), (0.051, [False])])
def test_a_rank_has_come_back_when_half_of_its_steps_are_on_time(lag: float, over: list[bool]) -> None:
    events = follow([0.5] * MIN_STEPS + [lag] * (MIN_STEPS // 2))
    assert [each.over for each in events] == over
    sooner = follow([0.5] * MIN_STEPS + [lag] * (MIN_STEPS // 2 - 1))
    assert [each.over for each in sooner] == [False]


def test_a_lag_is_held_against_the_median_of_the_others() -> None:
    four = {rank: pace(rank, 1, stood, dt=2.0) for rank, stood in enumerate((0.0, 0.4, 0.6, 1.0))}
    assert lags(four) == pytest.approx({0: 0.3, 1: 0.1, 2: -0.1, 3: -0.3})
    three = {rank: pace(rank, 1, stood) for rank, stood in enumerate((0.0, 0.4, 0.6))}
    assert lags(three) == pytest.approx({0: 0.5, 1: -0.1, 2: -0.4})
    assert lags({0: pace(0, 1, 0.0, dt=0.0), 1: pace(1, 1, 1.0, dt=0.0)}) == {0: 0.0, 1: 0.0}


def losses(*values: float) -> list[HeldOutLoss]:
    return [HeldOutLoss(step=step, loss=value, seconds=1.0) for step, value in enumerate(values, 1)]


def test_a_gain_is_more_than_min_delta_and_patience_counts_to_its_number() -> None:
    assert [evaluations_without_gain(losses(2.0, lower), 0.5) for lower in (1.5, 1.49)] == [1, 0]
    kept = Evaluation(every_steps=1, patience=2, min_delta=0.5)
    assert [stops_early(losses(2.0, *[1.5] * count), kept) for count in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(("loss", "finite"), [(699.9, True), (700.0, False)])
def test_a_perplexity_beyond_floats_is_infinite(loss: float, finite: bool) -> None:
    (one,) = losses(loss)
    assert math.isfinite(one.figures("sft")["eval/perplexity"]) == finite
    assert "eval/perplexity" not in one.figures("dpo")


def test_the_median_is_the_upper_one() -> None:
    assert (median([1.0, 2.0, 3.0, 4.0]), median([])) == (3.0, None)


def test_seconds_are_milliseconds_below_one() -> None:
    assert [milliseconds(seconds) for seconds in (0.9994, 1.0)] == ["999.4 ms", "1.00 s"]


def test_pictures_of_the_base_and_of_the_newest_evaluations_are_kept() -> None:
    run, resumed = RunState(), RunState()
    for step in (3, 0, 1, 4, 2):
        run.add(Drawn(rank=0, step=step, captions=(), pictures=(), at=0.0))
    assert DRAWN_EVALUATIONS == 2
    assert [event.step for event in run.drawn] == [0, 3, 4]
    assert [event["step"] for event in run.notes(3, keeps_best=False)["drawn"]] == [0, 3]
    resumed.restore(run.notes(4, keeps_best=False), with_metrics=False)
    assert resumed.drawn == run.drawn


def event(name: str, begin: float, end: float, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    place = {"pid": 1, "tid": args.pop("thread", 1)}
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "args": args, **place}


def kinds(found: trace.Split) -> dict[str, float]:
    return {kind: round(seconds * 1e6) for kind, seconds in found.seconds}


def test_what_reaches_over_a_steps_ends_counts_within_it_alone() -> None:
    step = event(f"{trace.STEP}1", 100, 200, "user_annotation")
    found = trace.split([step, event("aten::mm", 50, 120), event("aten::add", 190, 300)])
    assert kinds(found) == {"products": 20, "other operators": 10, "idle": 70}
    assert {each.name: each.calls for each in found.operators} == {"aten::mm": 0.0, "aten::add": 1.0}
    kernels = [event("gemm", 50, 120, "kernel", thread=7), event("copy", 190, 300, "gpu_memcpy", thread=7)]
    found = trace.split([step, *kernels])
    assert kinds(found) == {"products": 20, "other operators": 10, "idle": 70}
    assert {each.name: (round(each.seconds * 1e6), each.calls) for each in found.operators} == {
        "gemm": (20, 0.0),
        "copy": (10, 1.0),
    }


def test_a_gpu_that_waits_for_data_is_not_idle_then() -> None:
    found = trace.split(
        [
            event(f"{trace.STEP}1", 0, 100, "user_annotation"),
            event(f"{trace.PHASE}data", 10, 40, "user_annotation"),
            event("gemm", 30, 60, "kernel", thread=7),
        ]
    )
    assert kinds(found) == {"products": 30, "data": 20, "idle": 50}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "all_reduce"),
        ("gloo:scatter", "scatter"),
        ("c10d::send", "send and receive"),
    ],
)
def test_collectives_go_by_the_longest_word_in_their_name(name: str, kind: str) -> None:
    step = event(f"{trace.STEP}1", 0, 100, "user_annotation")
    found = trace.split([step, event(name, 20, 50, "user_annotation", thread=2)])
    assert kinds(found) == {kind: 30, "idle": 70}


def test_parts_that_were_neither_predicted_nor_measured_have_no_row() -> None:
    split = trace.split([event(f"{trace.STEP}1", 0, 100, "user_annotation"), event("aten::mm", 0, 60)])
    window = Window(rank=0, first=1, last=1, split=split, memory=(), trace="t.json", snapshot=None)
    assert window.steps == "step 1"
    assert [kind for kind, _, _ in compare(window, None)] == [
        "forward and backward",
        "of it products",
        "idle",
        "the whole step",
    ]


def test_configurations_are_flat_and_without_what_is_unset() -> None:
    values = {"a": {"b": 1, "c": {"d": None, "e": Path("x")}}, "f": True}
    assert _flat(values) == {"a.b": 1, "a.c.e": "x", "f": True}
