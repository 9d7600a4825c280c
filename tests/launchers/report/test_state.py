"""RunState: metrics of a run from the telemetry of the ranks of one node."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from estimator.job import Job, Machine, Target
from estimator.models import find
from estimator.plan import Plan
from estimator.planning.planner import plan
from launchers.report.metrics import Metrics, summarize
from launchers.report.state import KEPT_IMAGE_SETS, RunState
from launchers.report.telemetry import (
    DistInfo,
    Evaluated,
    EvaluationImages,
    Event,
    Memory,
    Phase,
    Step,
    Straggling,
    Warned,
)


def cpu_plan() -> Plan:
    """Plan of two nodes with one process each."""
    job = Job(model=find("tiny-llama"), global_batch_size=8)
    machine = Machine(cpu_cores=2, ram_bytes=24 * 2**30, disk_free_bytes=2**40)
    return plan(job, Target(machine=machine, nodes=2))


def with_peak(peak: float) -> Plan:
    plan_state = cpu_plan()
    prediction = dataclasses.replace(plan_state.prediction, peak_flops_per_gpu=peak, flops_per_token=1e9)
    return dataclasses.replace(plan_state, prediction=prediction)


def step(number: int, loss: float | None = 4.0, dt: float = 0.5, *, rank: int = 0, tokens: int = 600) -> Step:
    fixed = {"lr": 1e-3, "grad_norm": 1.0, "samples": 4, "dtf": 0.2, "dtb": 0.25}
    return Step(rank=rank, step=number, loss=loss, tokens=tokens, dt=dt, **fixed)


def evaluated(number: int, loss: float | None, seconds: float, *, rank: int = 0) -> Evaluated:
    return Evaluated(rank=rank, step=number, done=8, rows=8, seconds=seconds, loss=loss)


def state(
    plan: Plan | None, tokens: Sequence[int] | None, *events: Event, total: int | None = None
) -> RunState:
    run = RunState(plan, total_steps=total or len(tokens or ()), tokens_of_steps=tokens)
    for event in events:
        run.add(event)
    return run


def after(plan: Plan, tokens: Sequence[int], *events: Event) -> Metrics:
    """Return the metrics of the newest step."""
    return state(plan, tokens, *events).metrics[-1]


def test_speed_and_mfu_count_the_tokens_of_all_processes() -> None:
    metrics = after(cpu_plan(), [1000, 1200], step(2))
    assert (metrics.tokens_per_second, metrics.tokens_per_second_per_gpu) == (2400, 1200)
    assert metrics.samples_per_second == 16
    assert after(with_peak(1e13), [1000], step(1)).mfu == pytest.approx(2000 * 1e9 / (2 * 1e13))
    counted = dataclasses.replace(step(1), all_tokens=5000)  # by rank 0
    assert after(cpu_plan(), [1000], counted, step(1, None, rank=1)).tokens_per_second == 10_000
    unknown = state(cpu_plan(), None, step(1, tokens=100), step(1, None, rank=1, tokens=300))
    assert unknown.steps[0].tokens_per_second == 2 * 200 / 0.5  # other nodes' tokens: as many as this node's


def test_the_time_of_a_step_is_that_of_rank_0_in_any_order_of_reports() -> None:
    reports = (step(1, None, 0.9, rank=1), step(1, 4.0, 0.5), step(1, None, 0.8, rank=2))
    for order in (reports, reports[::-1]):
        run = state(cpu_plan(), [1000], *order)
        assert [(each.dt, each.loss, each.tokens_per_second) for each in run.metrics] == [(0.5, 4.0, 2000)]


def test_a_node_without_rank_0_reports_the_time_of_its_slowest_rank_and_no_loss() -> None:
    run = state(cpu_plan(), [1000], step(1, None, 0.4, rank=2), step(1, None, 0.5, rank=1), total=9)
    assert run.metrics == ()
    (only,) = run.steps
    assert (only.dt, only.loss, only.tokens_per_second, run.eta_seconds) == (0.5, None, 2000, 4.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_node_reports_the_speed_of_the_whole_run(rank: int) -> None:
    report = step(1, 4.0 if rank == 0 else None, 1.0, rank=rank, tokens=(100, 300)[rank])
    run = state(cpu_plan(), [400], report)
    assert run.steps[0].tokens_per_second == run.tokens_per_second == 400
    assert not run.metrics or summarize(run.metrics).tokens_per_second == 400


def test_the_eta_is_the_median_step_time_times_the_remaining_steps() -> None:
    first = step(1, dt=60.0)  # warms up
    assert after(cpu_plan(), [1000] * 10, first, step(2, dt=1.0), step(3, dt=1.0)).eta_seconds == 7.0


def test_the_eta_includes_evaluations_and_the_speed_does_not() -> None:
    run = state(cpu_plan(), [1000] * 10, step(1), step(2))
    before = run.metrics[-1]
    assert before.eta_seconds == run.eta_seconds == pytest.approx(8 * 0.5)
    for rank in (0, 1):  # all ranks report the same
        run.add(evaluated(2, 2.0, 0.75, rank=rank))
    run.add(evaluated(3, None, 9.0))  # in progress
    run.add(step(3))
    assert [(each.step, each.loss) for each in run.evaluations] == [(2, 2.0)]
    assert run.step(3).tokens_per_second == before.tokens_per_second
    assert run.step(3).eta_seconds == run.eta_seconds == pytest.approx(7 * 0.5 * 1.5)


def test_a_step_of_zero_duration_has_no_speed_and_no_eta() -> None:
    run = state(cpu_plan(), [1000] * 3, evaluated(0, 2.0, 5.0), step(1, dt=0.0))
    only = run.metrics[0]
    assert only.tokens_per_second == only.samples_per_second == only.eta_seconds == run.eta_seconds == 0


def test_a_resumed_run_shows_all_steps_and_bases_its_eta_on_its_own_steps() -> None:
    first = state(cpu_plan(), [1000] * 10, *(step(number, dt=9.0) for number in (1, 2, 3)))
    first.add(evaluated(2, 2.0, 50.0))
    first.add(evaluated(3, 3.0, 50.0))
    notes = first.notes(2, keeps_best=True)
    assert notes["best_step"] == 2
    assert first.notes(2, keeps_best=False)["best_step"] is None
    resumed = state(cpu_plan(), [1000] * 10)
    resumed.restore(notes, with_metrics=True)
    assert (resumed.last_step, resumed.eta_seconds) == (0, None)
    resumed.add(step(3))
    assert [each.step for each in resumed.metrics] == [1, 2, 3]
    assert [each.step for each in resumed.evaluations] == [2]
    assert (resumed.last_step, resumed.eta_seconds) == (3, 7 * 0.5)
    assert resumed.tokens_per_second == summarize(resumed.metrics).tokens_per_second


def test_the_phase_is_that_of_the_slowest_rank() -> None:
    phases = [Phase(rank=0, name="train", at=2.0), Phase(rank=1, name="load", at=1.0)]
    run = state(None, None, *phases)
    assert (run.phase, run.phases) == ("load", {0: "train", 1: "load"})


def test_a_checkpoint_lasts_until_training_continues() -> None:
    times = {"checkpoint": (1.0, 10.0, 20.0), "train": (4.0, 11.0, 22.0)}
    pairs = zip(times["checkpoint"], times["train"], strict=True)
    events = [Phase(rank=0, name=name, at=at) for pair in pairs for name, at in zip(times, pair, strict=True)]
    assert state(None, None, *events).checkpoint_seconds == 2.0


def test_each_rank_has_its_node_its_memory_peaks_and_its_speed() -> None:
    place = {"rank": 1, "local_rank": 1, "world_size": 2, "node": 0, "host": "h0", "pid": 7}
    run_info = {"backend": "nccl", "scheduler": "local", "engine": "fsdp2"}
    info = DistInfo(device="cuda:1 NVIDIA H200", **place, **run_info)
    peaks = Memory(rank=1, step=1, allocated_peak=5, reserved_peak=6, rss=7, rss_peak=8)
    steps = [step(1, None, 60.0, rank=1), step(2, None, rank=1), step(2)]
    run = state(cpu_plan(), [1000] * 2, info, peaks, *steps)
    first, second = run.ranks
    assert (first.rank, first.host, first.rss_peak_bytes, first.tokens_per_second) == (0, "", None, 1200)
    assert (second.host, second.device, second.tokens_per_second) == ("h0", "cuda:1 NVIDIA H200", 1200)
    assert (second.allocated_peak_bytes, second.reserved_peak_bytes, second.rss_peak_bytes) == (5, 6, 8)
    assert (run.memory_peak.size_bytes, run.memory_peak.counter) == (6, "reserved")


def test_each_late_rank_has_one_line_with_its_latest_state() -> None:
    late = Straggling(rank=1, local_rank=0, node=1, host="h1", since=3, step=20, share=0.3)
    assert "is late" in state(cpu_plan(), None, late).straggler_lines[0]
    over = dataclasses.replace(late, over=True)
    (line,) = state(cpu_plan(), None, late, over).straggler_lines
    assert "on time again" in line


def test_warnings_of_several_ranks_with_one_text_are_one() -> None:
    texts = ("liger off: a", "compile off: b", "liger off: a")
    run = state(cpu_plan(), None, *(Warned(rank=rank, text=text) for rank, text in enumerate(texts)))
    assert run.snapshot().warnings == texts[:2]


def test_a_run_without_a_plan_has_measured_speeds_but_none_without_events_or_tokens() -> None:
    empty = RunState()
    assert empty.steps == empty.ranks == empty.evaluations == empty.straggler_lines == ()
    assert empty.tokens_per_second is empty.mfu is empty.eta_seconds is empty.memory_peak is None
    for number in (1, 2, 3):
        empty.add(step(number, tokens=0))
    assert (empty.tokens_per_second, empty.mfu, empty.ranks[0].tokens_per_second) == (None, None, None)
    run = state(None, None, step(1), step(1, None, rank=1))
    (only,) = run.steps
    assert (only.tokens_per_second, only.samples_per_second, only.mfu) == (2400, 16, None)
    assert only.eta_seconds is None
    assert math.isclose(only.tokens_per_second_per_gpu, 1200)


def test_a_snapshot_is_left_unchanged_by_later_events() -> None:
    run = state(cpu_plan(), [1000] * 3, step(1), EvaluationImages(rank=0, step=0, captions=(), pictures=()))
    snapshot = run.snapshot()
    for event in (
        step(2),
        Phase(rank=0, name="save"),
        EvaluationImages(rank=0, step=1, captions=(), pictures=()),
    ):
        run.add(event)
    assert (len(snapshot.steps), len(snapshot.evaluation_images), snapshot.phase) == (1, 1, "")
    assert (len(run.steps), len(run.evaluation_images), run.phase) == (2, 2, "save")


def test_sample_images_of_the_base_and_of_the_latest_evaluations_are_kept() -> None:
    run, resumed = RunState(), RunState()
    for step in (3, 0, 1, 4, 2):
        run.add(EvaluationImages(rank=0, step=step, captions=(), pictures=(), at=0.0))
    assert KEPT_IMAGE_SETS == 2
    assert [event.step for event in run.evaluation_images] == [0, 3, 4]
    assert [event["step"] for event in run.notes(3, keeps_best=False)["drawn"]] == [0, 3]
    resumed.restore(run.notes(4, keeps_best=False), with_metrics=False)
    assert resumed.evaluation_images == run.evaluation_images
