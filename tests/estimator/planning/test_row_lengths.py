"""Memory predictions for the rows of the data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.calibration import Correction, apply
from estimator.job import Job, Target
from estimator.models import find
from estimator.plan import Plan
from estimator.planning.planner import plan
from estimator.planning.row_lengths import predict_for_rows


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(
        model=find("llama-8b"),
        engine="fsdp2",
        method="lora",
        global_batch_size=16,
        seq_len=2048,
        packing=False,
    )


@pytest.fixture(scope="module")
def planned(job: Job) -> Plan:
    return plan(job, Target(kind="kubernetes", gpu="h100-sxm", nodes=1, gpus=1))


def test_the_prediction_for_short_rows_equals_that_of_a_plan_for_this_length(job: Job, planned: Plan) -> None:
    short = predict_for_rows(planned, job, 256)
    layout = planned.layout
    same_layout = replace(
        job,
        seq_len=256,
        micro_batch_size=layout.micro_batch_size,
        activation_checkpointing=layout.activation_checkpointing,
        recompute=layout.recompute,
        recompute_every=layout.recompute_every,
    )
    expected = plan(same_layout, Target(kind="kubernetes", gpu="h100-sxm", nodes=1, gpus=1))
    assert short.prediction.memory.live_bytes == expected.prediction.memory.live_bytes
    assert short.prediction.memory.live_bytes < planned.prediction.memory.live_bytes
    assert short.layout == planned.layout
    assert short.request == planned.request


def test_rows_of_the_planned_length_leave_the_plan_unchanged(job: Job, planned: Plan) -> None:
    assert predict_for_rows(planned, job, planned.layout.seq_len) is planned


def test_a_correction_by_earlier_runs_is_kept(job: Job, planned: Plan) -> None:
    correction = Correction(
        gpu="H100 SXM", factor=1.1, largest_ratio=1.2, runs=3, live_factor=1.2, largest_live_ratio=1.3
    )
    memory = apply(planned.prediction.memory, correction)
    corrected = replace(planned, prediction=replace(planned.prediction, memory=memory))
    short, uncorrected = predict_for_rows(corrected, job, 256), predict_for_rows(planned, job, 256)
    assert short.prediction.memory.uncorrected is not None
    ratio = short.prediction.memory.shows_bytes / uncorrected.prediction.memory.shows_bytes
    assert ratio == pytest.approx(1.1, rel=1e-3)
    assert short.prediction.memory.needs_bytes > uncorrected.prediction.memory.needs_bytes
