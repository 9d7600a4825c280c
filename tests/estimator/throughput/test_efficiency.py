"""Speed against published runs, and the table of coefficients behind it."""

import csv
import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import fit_throughput, published_speeds, throughput_coefficients
from benchmarks.throughput_scores import covered, spread
from estimator.throughput.efficiency import TABLE, products_rate, published

RESULTS = json.loads((fit_throughput.RESULTS / "throughput_fit.json").read_text(encoding="utf-8"))
ROWS = list(csv.DictReader(TABLE.open(newline="", encoding="utf-8")))


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Predicted / measured - 1 of each published run, by its id."""
    found = {
        point.row.id: fit_throughput.log_error(point, published()) for point in published_speeds.points()
    }
    return {name: math.expm1(error) for name, error in found.items() if error is not None}


def test_the_median_error_of_published_tokens_per_second_is_at_most_15_percent(
    errors: dict[str, float],
) -> None:
    assert len(errors) >= 400
    assert statistics.median(map(abs, errors.values())) <= 0.15
    assert abs(statistics.median(errors.values())) <= 0.05


def test_the_committed_scores_match_the_committed_coefficients(errors: dict[str, float]) -> None:
    fitted = RESULTS["all"]["fitted"]["median_abs_error"]
    assert statistics.median(map(abs, errors.values())) == pytest.approx(fitted, abs=0.005)


def test_95_percent_of_held_out_runs_are_within_the_range() -> None:
    held = [errors[1] for errors in RESULTS["rows"].values()]
    source_of = {point.row.id: point.row.source for point in published_speeds.points()}
    sources = [source_of[row] for row in RESULTS["rows"]]
    logs = [None if error is None else math.log1p(error) for error in held]
    assert 0.93 <= covered(logs, sources) <= 0.97
    assert covered(logs, sources) == pytest.approx(RESULTS["all"]["source held out"]["covered"], abs=0.01)
    for percentile, value in spread(logs).items():
        assert published().of("range", f"p{percentile:g}") == pytest.approx(value, abs=0.003)


def test_the_fit_and_the_table_have_the_same_coefficients() -> None:
    fitted = {(spec.name, spec.scope) for spec in throughput_coefficients.SPECS}
    table = {(row["coefficient"], row["scope"]) for row in ROWS}
    assert len(table) == len(ROWS)
    assert all(row["meaning"] and row["source"] and float(row["value"]) > 0 for row in ROWS)
    assert {key for key in table if key[0] not in ("runs", "range")} == fitted


@pytest.mark.parametrize(
    ("coefficient", "low", "high"),
    [
        ("products", 0.6, 1.0),
        ("products of", 0.75, 1.4),
        ("best product", 0.5, 1.0),
        ("attention", 0.2, 1.2),  # over products in training, which reach 3/4 of the best one
        ("moved", 0.2, 2.5),
        ("grouped products", 0.3, 1.0),
        ("exposed expert", 0.0, 1.5),
        ("gain", 0.5, 4.0),
        ("launch", 0.0001, 0.02),
    ],
)
def test_coefficients_are_within_plausible_limits(coefficient: str, low: float, high: float) -> None:
    values = [float(row["value"]) for row in ROWS if row["coefficient"] == coefficient]
    assert values
    assert low <= min(values)
    assert max(values) <= high


def test_a_fit_without_runs_of_an_architecture_uses_the_common_share() -> None:
    data = published_speeds.points()
    others = [point for point in data if point.gpu.architecture != "Ampere"]
    table = fit_throughput.without_evidence(published(), others)
    ampere = next(point for point in data if point.gpu.architecture == "Ampere")
    share = (ampere.gpu.measured_tflops or 0) * 1e12 * published().of("products")
    assert products_rate(ampere.gpu, "bf16", table) == pytest.approx(share)
    own = published().of("products of", "Ampere 8.0")
    assert products_rate(ampere.gpu, "bf16", published()) == pytest.approx(share * own)


def test_a_fit_without_runs_of_a_recipe_and_kernel_kind_has_no_speed_for_it() -> None:
    data = published_speeds.points()
    others = [point for point in data if "Megatron" not in point.project]
    table = fit_throughput.without_evidence(published(), others)
    recipe = next(point for point in data if "Megatron" in point.project and point.setup.fp8 == "mxfp8")
    assert fit_throughput.log_error(recipe, table) is None
    assert fit_throughput.log_error(others[0], table) is not None


def test_typical_shares_of_the_peak_match_the_gpu_table() -> None:
    for name, share in throughput_coefficients.usual_best_products().items():
        assert published().of("best product", name) == pytest.approx(share, abs=0.0005)


def test_the_fit_recovers_the_coefficient_of_synthetic_data() -> None:
    """Speeds made with two thirds of the prior share of the peak, all else at its prior."""
    specs = throughput_coefficients.SPECS
    priors = np.array([spec.prior for spec in specs])
    index = next(i for i, spec in enumerate(specs) if (spec.name, spec.scope) == ("products", "*"))
    true = priors.copy()
    true[index] *= 2 / 3
    found = [p for p in published_speeds.points() if p.gpu.architecture == "Ampere"][:60]
    table = fit_throughput.table_of(true)
    made = []
    for point in found:
        error = fit_throughput.log_error(point, table)
        assert error is not None
        row = replace(point.row, tps_per_gpu=point.row.tps_per_gpu * math.exp(error))
        made.append(replace(point, row=row))
    fitted = fit_throughput.fit(made)
    own = next(i for i, spec in enumerate(specs) if (spec.name, spec.scope) == ("products of", "Ampere 8.0"))
    # The runs are all of one kind of chips, so that the common share and theirs are found as a product
    assert fitted[index] * fitted[own] == pytest.approx(true[index] * true[own], rel=0.05)
