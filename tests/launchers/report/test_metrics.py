"""Metrics of steps, and blank values."""

from __future__ import annotations

import pytest

from launchers.report.metrics import dist_lines, median, step_line, summarize
from launchers.report.telemetry import DistInfo
from tests.launchers.report.test_state import after, cpu_plan, state, step, with_peak


def test_the_step_line_fits_a_terminal() -> None:
    metrics = after(with_peak(1e15), [1000], step(1))
    line = step_line(metrics, 100_000)
    assert line.startswith("step 1/100000  loss 4.0000")
    assert "tok/s/GPU" in line, "two processes"
    assert len(line) < 140
    assert len(line[: line.index("  lr ")]) < 120 - 65  # before Metaflow's own signs
    assert "MFU" not in step_line(after(cpu_plan(), [1000], step(1)), 1), "unknown peak"
    assert "2.0 GiB" in step_line(metrics, 100_000, 2 * 2**30)


def test_a_summary_omits_the_warm_up_step() -> None:
    run = state(cpu_plan(), [1000] * 3, step(1, dt=60.0), step(2), step(3, loss=3.0))
    summary = summarize(run.metrics)
    assert summary.step_seconds == 0.5
    assert (summary.first_loss, summary.last_loss) == (4.0, 3.0)


def test_a_run_without_steps_has_no_summary_and_an_even_count_has_the_upper_median() -> None:
    assert (median([1.0, 2.0, 3.0, 4.0]), median([])) == (3.0, None)
    with pytest.raises(ValueError, match="no step"):
        summarize([])


def test_the_dist_block_names_every_rank_in_order() -> None:
    common = {"world_size": 2, "device": "cpu", "backend": "gloo", "scheduler": "local", "engine": "fsdp2"}
    ranks = [
        DistInfo(rank=rank, local_rank=0, node=rank, host=f"h{rank}", pid=10 + rank, **common)
        for rank in (1, 0)
    ]
    lines = dist_lines(ranks)
    assert "gloo" in lines[0]
    assert "h0, h1" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == ["0", "1"]
