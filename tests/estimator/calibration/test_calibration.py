"""Earlier runs correct the next estimate, and never make it less safe."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from estimator import calibration, memory, models
from estimator.calibration import Calibration, Correction, Finished, apply, formulas
from estimator.plan import GIB, MemoryEstimate
from estimator.setup import Setup
from tests.estimator.calibration.finished_runs import finished


def estimate(likely: int = 20 * GIB, upper: int = 23 * GIB) -> MemoryEstimate:
    return MemoryEstimate(
        categories=(
            ("weights", likely - likely // 2),
            ("activations", likely // 4),
            ("allocator", likely // 2 - likely // 4),
        ),
        needs_range=(likely, upper),
        shows_bytes=likely,
        shows_range=(likely, upper),
        capacity_bytes=80 * GIB,
        host_bytes=100 * GIB,
        needs_basis="+15%: a table",
        shows_basis="+15%: a table",
    )


def runs(*ratios: float) -> list[Finished]:
    """Runs whose process and whose tensors took so many times what was predicted."""
    return [
        finished(
            str(number),
            measured_bytes=round(ratio * 20 * GIB),
            predicted_live_bytes=10 * GIB,
            allocated_bytes=round(ratio * 10 * GIB),
        )
        for number, ratio in enumerate(ratios)
    ]


def found(*ratios: float) -> Correction:
    correction = Calibration(runs(*ratios)).correction("torchtune", "lora", "H100 SXM")
    assert correction is not None
    return correction


def test_one_run_corrects_a_third_of_the_error_and_many_runs_nearly_all() -> None:
    assert found(1.3).factor == pytest.approx(1.3 ** (1 / 3))
    assert found(*[1.3] * 3).factor == pytest.approx(1.3 ** (3 / 5))
    assert found(*[1.3] * 100).factor == pytest.approx(1.3, rel=0.01)


def test_a_correction_applies_to_reserved_memory_as_to_process_memory() -> None:
    before = dataclasses.replace(estimate(), outside_bytes=2 * GIB)
    correction = found(1.3)
    reserved = apply(before, correction).counted("reserved")
    assert reserved.likely_bytes == pytest.approx(18 * GIB * correction.factor, abs=2)


def test_an_outlier_hardly_changes_the_likely_value_but_sets_the_upper_bound() -> None:
    odd = found(*[1.0] * 10, 3.0)
    assert odd.factor == pytest.approx(1.0)
    assert apply(estimate(), odd).shows_range[1] >= 60 * GIB


def test_only_runs_of_the_same_engine_method_and_gpu_count() -> None:
    known = Calibration(runs(1.2))
    assert known.correction("torchtune", "lora", "H100 SXM") is not None
    assert known.correction("deepspeed", "lora", "H100 SXM") is None
    assert known.correction("torchtune", "qlora", "H100 SXM") is None
    assert known.correction("torchtune", "lora", "A100-80GB") is None


def test_runs_that_other_formulas_predicted_do_not_count() -> None:
    old = dataclasses.replace(runs(1.2)[0], formulas="of last year")
    assert Calibration([old]).correction("torchtune", "lora", "H100 SXM") is None


def test_memory_beyond_the_formulas_is_a_separate_category() -> None:
    corrected = apply(estimate(), found(*[1.2] * 3))
    assert dict(corrected.categories)["calibration"] == corrected.needs_bytes - 20 * GIB
    assert corrected.categories[:3] == estimate().categories


def test_a_lower_measurement_reduces_activations_and_leaves_weights_unchanged() -> None:
    corrected = dict(apply(estimate(), found(*[0.9] * 3)).categories)
    assert corrected["weights"] == dict(estimate().categories)["weights"]
    assert corrected["activations"] < dict(estimate().categories)["activations"]


def test_few_runs_never_lower_the_upper_bound() -> None:
    assert apply(estimate(), found(*[0.7] * 18)).shows_range[1] == 23 * GIB
    assert apply(estimate(), found(*[0.7] * 19)).shows_range[1] < 23 * GIB


def test_needed_and_shown_memory_are_corrected_by_the_matching_measurement() -> None:
    """What a process shows says nothing of what it needs; the tensors that were alive do."""
    reserved_more = [dataclasses.replace(run, allocated_bytes=10 * GIB) for run in runs(*[1.5] * 3)]
    correction = Calibration(reserved_more).correction("torchtune", "lora", "H100 SXM")
    assert correction is not None
    corrected = apply(estimate(), correction)
    assert corrected.shows_bytes > 24 * GIB
    assert corrected.needs_bytes == 20 * GIB
    more_tensors = apply(estimate(), found(*[1.5] * 3))
    assert more_tensors.needs_bytes == pytest.approx(20 * GIB + 15 * GIB * (1.5 ** (3 / 5) - 1), rel=0.01)


def test_correcting_an_estimate_twice_is_an_error() -> None:
    corrected = apply(estimate(), found(1.2))
    assert corrected.uncorrected == estimate()
    with pytest.raises(ValueError, match="already"):
        apply(corrected, found(1.2))


def test_on_cpus_host_memory_is_the_corrected_upper_end_times_the_processes() -> None:
    parts = (*estimate().categories, ("runtime", 3 * GIB))  # a CPU's process needs the most that it shows
    before = dataclasses.replace(estimate(), categories=parts, host_bytes=4 * 23 * GIB)
    on_cpu = apply(before, dataclasses.replace(found(1.5), gpu="cpu"))
    assert on_cpu.host_bytes == pytest.approx(4 * on_cpu.shows_range[1], abs=8)
    assert apply(before, found(1.5)).host_bytes == before.host_bytes


@given(
    some.lists(some.floats(0.11, 9.0), min_size=1, max_size=40),
    some.integers(1000, 10**12),
    some.floats(1.0, 2.0),
)
def test_the_upper_bound_covers_every_earlier_run_relative_to_its_prediction(
    ratios: list[float], likely: int, width: float
) -> None:
    past = runs(*ratios)
    correction = Calibration(past).correction("torchtune", "lora", "H100 SXM")
    before = estimate(likely, int(likely * width))
    after = apply(before, correction)
    for run in past:
        assert after.shows_range[1] >= run.measured_bytes * (likely / run.predicted_bytes) - 1
    assert after.shows_range[1] >= after.shows_bytes
    assert all(size > 0 for _, size in after.categories)
    assert after.shows_bytes == round(likely * correction.factor)


def test_a_setup_is_corrected_by_runs_on_its_device() -> None:
    setup = Setup(model=models.find("tiny-llama"), device="cpu", precision="fp32")
    before = memory.estimate(setup)
    on_cpu = finished(method="full", gpu="cpu", formulas=formulas("torchtune", "full"))
    known = Calibration([on_cpu])
    assert known.corrected(before, setup, None).shows_bytes > before.shows_bytes
    other = known.corrected(before, dataclasses.replace(setup, device="cuda"), "H100 SXM")
    assert other == dataclasses.replace(before, formulas=formulas("torchtune", "full"))
    assert known.of(dataclasses.replace(setup, device="cuda"), None) is None


def test_the_live_ratio_needs_measured_and_predicted_tensor_bytes() -> None:
    assert finished(allocated_bytes=6, predicted_live_bytes=5).live_ratio == 1.2
    assert finished(allocated_bytes=6).live_ratio is finished(predicted_live_bytes=5).live_ratio is None


def test_a_quantized_base_makes_lora_the_method_qlora() -> None:
    setup = Setup(model=models.find("llama-8b"), method="lora", quantization="nf4")
    assert calibration.method_of(setup) == "qlora"
    assert calibration.method_of(dataclasses.replace(setup, method="dora")) == "qdora"
