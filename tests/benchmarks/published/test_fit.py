"""Memory predictions against published peaks: as fitted, and with each publication held out in turn.

``benchmarks/published/fit.py`` says what is fitted: a factor and a range for each of a few classes, no row.
"""

import json
from dataclasses import replace
from functools import lru_cache

import pytest

from benchmarks.published import fit, refit, rows
from estimator.memory.residuals import table


@lru_cache(maxsize=1)
def runs() -> tuple[fit.MeasuredRun, ...]:
    return tuple(fit.runs_of(rows.read(rows.TABLE)))


@lru_cache(maxsize=1)
def scores() -> dict[str, dict[str, float]]:
    precise = {run.id for run in runs() if run.quality == "A"}
    factors = list(table().values())
    inside = fit.predict(runs(), fit.fit(runs(), factors))
    outside = fit.held_out(list(runs()), factors)
    return {
        "in_sample": fit.score([each for each in inside if each.run.id in precise]),
        "held_out_by_source": fit.score([each for each in outside if each.run.id in precise]),
    }


@pytest.mark.parametrize("how", ["in_sample", "held_out_by_source"])
def test_errors_of_half_of_the_precise_rows_are_within_5_percent_and_of_19_in_20_within_20(how: str) -> None:
    score = scores()[how]
    assert score["median_abs_error"] <= 0.05
    assert score["p95_abs_error"] <= 0.2


def test_the_range_covers_19_of_20_rows_of_held_out_sources() -> None:
    every = fit.score(fit.held_out(list(runs()), list(table().values())))
    assert 0.93 <= every["covered"] <= 0.97
    assert every["median_abs_error"] <= 0.06


def test_the_committed_residuals_and_scores_match_the_fit() -> None:
    factors = list(table().values())
    assert fit.fit(runs(), factors) == table()
    committed = json.loads((refit.RESULTS / "estimator_fit.json").read_text(encoding="utf-8"))
    assert {name: committed[name]["all"] for name in scores()} == scores()


@pytest.mark.slow
def test_a_refit_from_any_start_reaches_the_committed_factors() -> None:
    factors = list(table().values())
    shifted = [row if row.name in fit.GIVEN else replace(row, factor=1.5 * row.factor) for row in factors]
    assert list(refit.settled(rows.read(rows.TABLE), shifted).values()) == factors


def test_each_class_has_one_factor_and_its_widths() -> None:
    fitted = [row for row in table().values() if row.name not in fit.GIVEN]
    assert len(fitted) <= 12
    assert len(runs()) > 10 * len(fitted)
    for row in fitted:
        assert 1 <= row.factor <= 1.1  # the formulas carry the prediction
        assert row.lower < 1 < row.upper <= 1.8


# The study's runs of one model that differ in one setting each: torchtune's README, Llama 3.2 3B, A100.
# Their differences say whether each part is right, where a sum could hide two errors.
@pytest.mark.parametrize(
    ("with_it", "without", "difference_gib"),
    [
        ("m0138", "m0137", 60.0 - 51.0),  # compiled blocks
        ("m0139", "m0138", 51.0 - 42.9),  # the loss in chunks
        ("m0140", "m0139", 42.9 - 24.9),  # checkpointing
        ("m0141", "m0140", 24.9 - 23.1),  # the optimizer in the backward pass
        ("m0142", "m0141", 23.1 - 21.8),  # activations on the host
    ],
)
def test_the_memory_saved_by_each_torchtune_setting_is_predicted(
    with_it: str, without: str, difference_gib: float
) -> None:
    predicted = {run.id: run.fixed + run.dynamic for run in runs()}
    assert predicted[without] - predicted[with_it] == pytest.approx(difference_gib, abs=0.6)
