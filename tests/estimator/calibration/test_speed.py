"""Finished runs correct the predicted speed of later plans on the same GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest

from estimator import hardware, models, throughput
from estimator.calibration import Calibration, Finished
from estimator.calibration.speed import RUNS_FOR_A_BOUND, apply, correction, formulas
from estimator.job import Job, Target
from estimator.planning.planner import plan
from estimator.setup import Setup
from estimator.throughput import Speed
from tests.estimator.calibration.finished_runs import finished

GPU = "H100 SXM"


def runs(*ratios: float, engine: str = "fsdp2", method: str = "lora", **changes: object) -> list[Finished]:
    """Runs of this engine that took so many times the predicted tokens per second."""
    values = {
        "speed_formulas": formulas(engine, method),  # type: ignore[arg-type]
        "predicted_tokens_per_second": 10_000.0,
    }
    return [
        finished(
            f"{engine}/{number}",
            engine=engine,
            method=method,
            **(values | {"measured_tokens_per_second": 10_000.0 * ratio} | changes),
        )
        for number, ratio in enumerate(ratios)
    ]


def setup(engine: str = "fsdp2", method: str = "lora") -> Setup:
    return Setup(model=models.find("llama-8b"), engine=engine, method=method)  # type: ignore[arg-type]


def uncorrected(step: Setup) -> Speed:
    return throughput.speed(step, hardware.gpu(GPU))


def corrected(finished_runs: list[Finished], step: Setup, gpu: str = GPU) -> Speed:
    return Calibration(finished_runs).corrected_speed(uncorrected(step), step, gpu)


def test_more_runs_move_the_speed_closer_to_their_ratio() -> None:
    rates = [corrected(runs(*[0.8] * count), setup()).tokens_per_second for count in (0, 1, 3, 30)]
    assert rates == sorted(rates, reverse=True)
    first = uncorrected(setup()).tokens_per_second
    assert rates[0] == first
    assert rates[-1] == pytest.approx(0.8 * first, rel=0.01)


def test_the_next_prediction_is_closer_to_the_measurement_of_the_first_run() -> None:
    before = uncorrected(setup()).tokens_per_second
    measured = 0.85 * before
    (run,) = runs(1.0, predicted_tokens_per_second=before, measured_tokens_per_second=measured)
    after = corrected([run], setup()).tokens_per_second
    assert abs(after / measured - 1) < 0.6 * abs(before / measured - 1)


def test_time_parts_and_utilization_follow_the_corrected_rate() -> None:
    first, second = uncorrected(setup()), corrected(runs(0.8, 0.8), setup())
    assert second.step_seconds == pytest.approx(
        first.step_seconds * first.tokens_per_second / second.tokens_per_second
    )
    assert second.parts.total == pytest.approx(second.step_seconds)
    assert second.mfu / first.mfu == pytest.approx(second.tokens_per_second / first.tokens_per_second)
    assert second.uncorrected == first.tokens_per_second
    assert "calibrated on 2 runs" in second.basis


def test_another_engine_on_the_gpu_is_corrected_by_less_and_another_gpu_not_at_all() -> None:
    slow = runs(0.7, 0.7, 0.7)
    own = corrected(slow, setup())
    other = corrected(slow, setup("torchtune"))
    own_factor, other_factor = (speed.tokens_per_second / speed.uncorrected for speed in (own, other))
    assert own_factor < other_factor < 1
    # a measured engine must not lose its rank by its own measurement alone
    assert own_factor / other_factor > math.sqrt(0.7)
    assert "other engines or methods" in other.basis
    unmeasured = corrected(slow, setup(), "A100 SXM 80GB")
    assert (unmeasured.uncorrected, unmeasured.formulas) == (None, formulas("fsdp2", "lora"))


@pytest.mark.parametrize(
    "changes",
    [
        {"speed_formulas": "0123456789ab"},
        {"measured_tokens_per_second": None},
        {"predicted_tokens_per_second": None},
        {"measured_tokens_per_second": 1.0},
        {"engine": "unknown-engine", "formulas": "x"},
    ],
)
def test_runs_of_other_formulas_and_incomparable_runs_correct_nothing(changes: dict[str, object]) -> None:
    records = [dataclasses.replace(run, **changes) for run in runs(0.5)]
    assert corrected(records, setup()).uncorrected is None


def test_the_range_contains_the_measured_runs_and_narrows_only_with_many() -> None:
    first = uncorrected(setup())
    low, high = first.tokens_per_second_range
    few = apply(first, correction([0.4, 1.0, 1.6], [0.4, 1.0, 1.6]))
    assert few.tokens_per_second_range[0] <= min(low, 0.4 * first.tokens_per_second)
    assert few.tokens_per_second_range[1] >= max(high, 1.6 * first.tokens_per_second)
    ratios = [0.97, 1.03] * RUNS_FOR_A_BOUND
    many = apply(first, correction(ratios, ratios))
    assert many.tokens_per_second_range == pytest.approx(
        (0.97 * first.tokens_per_second, 1.03 * first.tokens_per_second)
    )


def test_a_corrected_speed_is_not_corrected_twice() -> None:
    once = corrected(runs(0.8), setup())
    with pytest.raises(ValueError, match="corrected already"):
        apply(once, correction([0.8], [0.8]))


def test_an_unknown_speed_stays_unknown() -> None:
    unknown = Speed(None, "no published speed for this device")
    assert Calibration(runs(0.8)).corrected_speed(unknown, setup(), GPU) == unknown


def test_formulas_of_an_engine_and_method_have_their_own_stable_id() -> None:
    ids = {formulas("fsdp2", "lora"), formulas("fsdp2", "full"), formulas("deepspeed", "lora")}
    assert len(ids) == 3
    formulas.cache_clear()
    assert formulas("fsdp2", "lora") in ids


def test_a_plan_on_a_measured_gpu_has_the_corrected_speed_and_step_time() -> None:
    job = Job(model=models.find("llama-8b"), method="lora", engine="fsdp2")
    target = Target(kind="catalogue", gpu=GPU, nodes=1, gpus=1)
    before = plan(job, target, calibration=Calibration())
    after = plan(job, target, calibration=Calibration(runs(*[0.8] * 30)))
    first, second = before.prediction, after.prediction
    assert second.tokens_per_second == pytest.approx(0.8 * first.tokens_per_second, rel=0.01)
    step_seconds = [sum(seconds for _, seconds in prediction.step_parts) for prediction in (first, second)]
    assert step_seconds[1] == pytest.approx(1.25 * step_seconds[0], rel=0.01)
    assert second.uncorrected_tokens_per_second == pytest.approx(first.tokens_per_second)
    assert first.uncorrected_tokens_per_second is None
    assert second.speed_formulas == first.speed_formulas == formulas("fsdp2", "lora")
