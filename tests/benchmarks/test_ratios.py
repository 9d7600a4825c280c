"""Bandwidth relative to a bare loop: sensitivity of the ratio to overhead, and robustness to noise."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import ratios


def drifting_times(cost: float, *, count: int = 400, seed: int = 0) -> ratios.Turns:
    """Return times that drift by a factor of four and vary by 20 %; ours take ``cost`` more."""
    random = np.random.default_rng(seed)
    drift = 4 ** (np.arange(count) / count)
    bare, ours = (drift * random.lognormal(0, 0.2, count) * 1e-3 for _ in range(2))
    return list(ours * (1 + cost)), list(bare)


def test_equal_loops_have_a_ratio_of_one_despite_drift_and_noise() -> None:
    ratio = ratios.of_cell(drifting_times(0.0))
    assert ratio.low < 1 < ratio.high
    assert ratio.value == pytest.approx(1, abs=0.03)


def test_a_real_timing_overhead_is_outside_the_interval() -> None:
    ratio = ratios.of_cell(drifting_times(0.15))
    assert ratio.high < 0.95
    assert ratio.value == pytest.approx(1 / 1.15, abs=0.03)


def test_outlier_repetitions_do_not_change_the_ratio() -> None:
    ours, bare = drifting_times(0.0)
    spiked = [value * (50 if index % 20 == 0 else 1) for index, value in enumerate(ours)]
    assert ratios.of_cell((spiked, bare)).value == pytest.approx(ratios.of_cell((ours, bare)).value, abs=0.05)


def test_each_cell_has_equal_weight_for_any_number_of_repetitions() -> None:
    short_turns, many = drifting_times(0.0, count=20), drifting_times(0.5, count=2000)
    of_three = ratios.overall([short_turns, drifting_times(0.0, count=20, seed=1), many])
    assert of_three.value > 0.9
    assert of_three.turns == 2040
