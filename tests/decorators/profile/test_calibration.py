"""The calibration record of a finished step: compared values, exclusions, and errors that end no run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from decorators.profile.calibration import comparable_peak, comparable_speed, finished, store
from decorators.profile.measured import Measured
from estimator import calibration
from estimator.calibration import VARIABLE, Finished, Store, formulas
from estimator.plan import Plan
from tests.decorators.profile.states import make_state

GIB = 2**30


def pair(**changes: Any) -> tuple[Plan, Measured]:
    state = make_state(**changes)
    assert state.plan is not None
    return state.plan, state.measured


def record(plan: Plan, measured: Measured) -> Finished | None:
    return finished(plan, measured, run="F/1/train/2", date="2026-01-02T03:04:05+00:00", formulas="abc")


def with_memory(plan: Plan, **changes: Any) -> Plan:
    memory = dataclasses.replace(plan.prediction.memory, **changes)
    return dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, memory=memory))


def test_process_memory_is_the_nvml_peak_minus_the_memory_in_use_before_the_step() -> None:
    plan, measured = pair()
    assert comparable_peak(plan, measured) == (33 * GIB - GIB // 2, "device")


def test_without_nvml_the_predicted_memory_outside_of_torch_is_added_to_its_reserve() -> None:
    plan, measured = pair(nvml=False)
    assert measured.memory_peak.counter == "reserved"
    memory = plan.prediction.memory
    first = dataclasses.replace(memory, outside_bytes=2 * GIB)
    # What it needs of the context, and what a correction made of it, are other quantities
    corrected = with_memory(plan, outside_bytes=3 * GIB, uncorrected=first)
    peak = comparable_peak(corrected, measured)
    assert peak == (
        measured.memory_peak.size_bytes + 2 * GIB,
        "reserved, plus predicted memory outside of torch",
    )


def test_no_record_is_made_without_nvml_if_the_memory_outside_of_torch_is_not_predicted() -> None:
    plan, measured = pair(nvml=False)
    assert record(with_memory(plan, outside_bytes=None), measured) is None
    assert record(with_memory(pair()[0], outside_bytes=None), pair()[1]) is not None, "NVML saw the whole"


def test_a_run_that_matches_its_prediction_has_a_correction_of_one_by_any_counter() -> None:
    for nvml in (True, False):
        plan, measured = pair(nvml=nvml)
        shown = plan.prediction.memory.shows_bytes
        ranks = tuple(dataclasses.replace(rank, reserved_peak_bytes=shown - GIB) for rank in measured.ranks)
        gpus = tuple(dataclasses.replace(gpu, peak_used_bytes=shown + GIB // 2) for gpu in measured.gpus)
        stored_record = record(plan, dataclasses.replace(measured, ranks=ranks, gpus=gpus))
        assert stored_record.ratio == 1.0


def test_nvml_values_below_the_memory_reserved_by_torch_are_ignored() -> None:
    plan, measured = pair()
    gpus = tuple(dataclasses.replace(gpu, peak_used_bytes=GIB) for gpu in measured.gpus)
    peak = comparable_peak(plan, dataclasses.replace(measured, gpus=gpus))
    assert peak[1].startswith("reserved")


def test_on_a_cpu_the_record_has_resident_memory() -> None:
    plan, measured = pair(on_gpus=False)
    stored_record = record(plan, measured)
    assert (stored_record.gpu, stored_record.measured_kind) == ("cpu", "resident")
    assert stored_record.measured_bytes == max(rank.rss_peak_bytes or 0 for rank in measured.ranks)
    assert stored_record.reserved_bytes is stored_record.allocated_bytes is None


def test_the_record_has_the_gpu_name_of_the_catalog_and_the_counters_of_torch() -> None:
    stored_record = record(*pair())
    assert stored_record.gpu == "A100-80GB" or "A100" in stored_record.gpu
    assert stored_record.allocated_bytes < stored_record.reserved_bytes < stored_record.measured_bytes
    assert stored_record.torch
    assert "8 processes, fsdp, micro batch 1 x 1, 2048 tokens, bf16, adamw" in stored_record.setup


def test_the_uncorrected_prediction_is_stored() -> None:
    plan, measured = pair()
    first = plan.prediction.memory
    stored_record = record(
        with_memory(plan, categories=(("weights", 50 * GIB),), shows_bytes=60 * GIB, uncorrected=first),
        measured,
    )
    assert (stored_record.predicted_bytes, stored_record.predicted_upper_bytes) == (
        first.shows_bytes,
        first.shows_range[1],
    )
    assert (stored_record.predicted_live_bytes, stored_record.predicted_categories) == (
        first.live_bytes,
        first.categories,
    )


def test_no_record_is_made_for_other_nodes_and_for_runs_too_short_to_reach_their_peak() -> None:
    plan, measured = pair()
    assert record(plan, dataclasses.replace(measured, node=1)) is None
    assert record(plan, dataclasses.replace(measured, steps=1)) is None
    assert record(plan, dataclasses.replace(measured, ranks=())) is None


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("llama-8b", "llama-8b"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/data/jane/secret/my-model/", "my-model"),
        ("s3://private-bucket/team/my-model", "my-model"),
        ("./my-model", "my-model"),
    ],
)
def test_a_record_contains_no_path_of_the_user(model: str, path: str) -> None:
    plan, measured = pair()
    stored_record = record(dataclasses.replace(plan, model=model), measured)
    assert stored_record.model == path
    assert "node-0" not in stored_record.to_json()


def test_an_unwritable_store_prints_one_line_and_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    line = store(*pair(), run="F/1/train/2", in_container=False)
    assert line.startswith("calibration: this run could not be stored: IsADirectoryError")
    assert "\n" not in line


def test_a_plan_without_a_formula_version_counts_as_made_by_the_current_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "runs.jsonl"))
    plan, measured = pair()
    assert store(with_memory(plan, formulas=""), measured, run="F/1/train/2", in_container=False) is None
    assert Store().read().finished[0].formulas == formulas("torchtune", "full")


def test_a_container_writes_records_only_to_a_configured_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert store(*pair(), run="F/1/train/2", in_container=True) is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "runs.jsonl"))
    assert store(*pair(), run="F/1/train/2", in_container=True) is None
    assert len(Store().read().finished) == 1


def full_steps(**changes: Any) -> tuple[Plan, Measured]:
    """Return a plan and a run with as many tokens per step as planned."""
    plan, measured = pair()
    prediction = dataclasses.replace(
        plan.prediction, tokens_per_second=4_500.0, step_parts=(("forward and backward", 2.0),)
    )
    values = {"step_tokens": 9_000.0, "tokens_per_second": 5_000.0}
    return dataclasses.replace(plan, prediction=prediction), dataclasses.replace(
        measured, **(values | changes)
    )


def test_the_record_of_full_steps_has_the_measured_speed_and_the_uncorrected_prediction() -> None:
    plan, measured = full_steps()
    prediction = dataclasses.replace(plan.prediction, uncorrected_tokens_per_second=4_000.0)
    corrected = dataclasses.replace(plan, prediction=prediction)
    run = finished(corrected, measured, run="F/1", date="2026-01-02", formulas="a", speed_formulas="b")
    assert (run.measured_tokens_per_second, run.predicted_tokens_per_second) == (5_000.0, 4_000.0)
    assert (run.speed_ratio, run.speed_formulas) == (1.25, "b")


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 4},
        {"step_tokens": 100.0},
        {"step_tokens": None},
        {"data_wait_share": 0.2},
    ],
)
def test_speed_is_not_compared_if_something_else_than_the_hardware_limits_it(changes: dict[str, Any]) -> None:
    plan, measured = full_steps(**changes)
    assert comparable_speed(plan, measured) is None
    assert comparable_speed(*full_steps(data_wait_share=0.01)) == 5_000.0


def test_speed_is_not_compared_for_generated_answers_and_unknown_predictions() -> None:
    plan, measured = full_steps()
    assert comparable_speed(dataclasses.replace(plan, task="grpo"), measured) is None
    unknown = dataclasses.replace(plan.prediction, tokens_per_second=None)
    assert comparable_speed(dataclasses.replace(plan, prediction=unknown), measured) is None


def test_the_speed_of_a_stored_run_corrects_the_next_estimate_on_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "calibration.jsonl"))
    plan, measured = full_steps()
    assert store(plan, measured, run="F/1/train/2", in_container=False) is None
    corrections, problems = calibration.load()
    assert problems == ()
    correction = corrections.speed_correction(plan.engine, plan.method, "A100 SXM 80GB")
    assert correction is not None
    assert correction.ratios == pytest.approx([5_000 / 4_500])
    assert 1 < correction.factor < 5_000 / 4_500
