"""Metrics: what a step's figures mean, and what is left blank."""

from __future__ import annotations

import dataclasses

import pytest

from estimator.job import Job, Machine, Target
from estimator.models import find
from estimator.plan import Plan
from estimator.planning.planner import plan
from launchers.report.metrics import Meter, dist_lines, duration, step_line, summarise
from launchers.report.telemetry import DistInfo, Evaluated, Phase, Step


def cpu_plan() -> Plan:
    job = Job(model=find("tiny-llama"), global_batch_size=8)
    machine = Machine(cpu_cores=2, ram_bytes=24 * 2**30, disk_free_bytes=2**40)
    return plan(job, Target(machine=machine, nodes=2))


def with_peak(peak: float) -> Plan:
    made = cpu_plan()
    prediction = dataclasses.replace(made.prediction, peak_flops_per_gpu=peak, flops_per_token=1e9)
    return dataclasses.replace(made, prediction=prediction)


def step(number: int, loss: float | None = 4.0, dt: float = 0.5) -> Step:
    return Step(
        rank=0,
        step=number,
        loss=loss,
        lr=1e-3,
        grad_norm=1.0,
        samples=4,
        tokens=600,
        dt=dt,
        dtf=0.2,
        dtb=0.25,
    )


def test_speed_counts_the_tokens_of_all_processes() -> None:
    metrics = Meter(cpu_plan(), [1000, 1200]).add(step(2))
    assert (metrics.tokens_per_second, metrics.tokens_per_second_per_gpu) == (2400, 1200)
    assert metrics.samples_per_second == 16


def test_mfu_is_model_flops_over_the_peak_of_all_gpus() -> None:
    metrics = Meter(with_peak(1e13), [1000]).add(step(1))
    assert metrics.mfu == pytest.approx(2000 * 1e9 / (2 * 1e13))


def test_an_unknown_peak_gives_no_mfu() -> None:
    metrics = Meter(cpu_plan(), [1000]).add(step(1))
    assert metrics.mfu is None
    assert "MFU" not in step_line(metrics, 1)


def test_other_ranks_steps_and_other_events_are_not_counted_again() -> None:
    meter = Meter(cpu_plan(), [1000])
    assert meter.add(step(1, loss=None)) is None
    assert meter.add(Phase(rank=0, name="save")) is None


def test_the_eta_is_the_median_step_times_what_is_left() -> None:
    meter = Meter(cpu_plan(), [1000] * 10)
    meter.add(step(1, dt=60.0))  # the first step warms up
    meter.add(step(2, dt=1.0))
    metrics = meter.add(step(3, dt=1.0))
    assert metrics.eta_seconds == 7.0


def test_the_step_line_fits_a_terminal() -> None:
    metrics = Meter(with_peak(1e15), [1000]).add(step(1))
    assert metrics is not None
    line = step_line(metrics, 100_000)
    assert line.startswith("step 1/100000  loss 4.0000")
    assert len(line) < 130
    assert len(line[: line.index("  lr ")]) < 120 - 65  # before Metaflow's own signs
    assert "2.0 GiB" in step_line(metrics, 100_000, 2 * 2**30)


def test_a_summary_leaves_out_the_step_that_warms_up() -> None:
    meter = Meter(cpu_plan(), [1000] * 3)
    rows = [meter.add(step(1, dt=60.0)), meter.add(step(2)), meter.add(step(3, loss=3.0))]
    summary = summarise([row for row in rows if row is not None])
    assert summary.step_seconds == 0.5
    assert (summary.first_loss, summary.last_loss) == (4.0, 3.0)


def test_a_run_without_a_step_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no step"):
        summarise([])


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:01"), (61, "1:01"), (3661, "1:01:01")])
def test_durations_read_as_on_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_dist_block_names_every_rank_in_order() -> None:
    ranks = [
        DistInfo(
            rank=rank,
            local_rank=0,
            world_size=2,
            node=rank,
            host=f"h{rank}",
            device="cpu",
            backend="gloo",
            scheduler="local",
            engine="torchtune",
            pid=10 + rank,
        )
        for rank in (1, 0)
    ]
    lines = dist_lines(ranks)
    assert "gloo" in lines[0]
    assert "h0, h1" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == ["0", "1"]


def test_the_time_left_counts_evaluations_and_the_speed_does_not() -> None:
    meter = Meter(cpu_plan(), [1000] * 10)
    meter.add(step(1))
    before = meter.add(step(2))
    assert before.eta_seconds == pytest.approx(8 * 0.5)
    for rank in (0, 1):  # all ranks say the same
        meter.add(Evaluated(rank=rank, step=2, done=8, rows=8, seconds=0.75, loss=2.0))
    meter.add(Evaluated(rank=0, step=3, done=1, rows=8, seconds=9.0))  # under way
    after = meter.add(step(3))
    assert after.tokens_per_second == before.tokens_per_second
    assert after.eta_seconds == pytest.approx(7 * 0.5 * 1.5)
