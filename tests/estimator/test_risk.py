"""Risk of running out of memory, and its verdict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.plan import GIB
from estimator.risk import TIGHT_BELOW, least_capacity, out_of_memory_risk, verdict_of

NEEDS = st.integers(GIB // 10, 200 * GIB)
BELOW, ABOVE = st.floats(0.3, 1.0), st.floats(1.0, 1.8)


@given(NEEDS, BELOW, ABOVE, st.floats(0.1, 3.0), st.floats(1.0, 1.5))
def test_risk_is_a_probability_that_falls_with_the_capacity(
    needs: int, lower: float, upper: float, share: float, more: float
) -> None:
    limits = (int(needs * lower), int(needs * upper))
    risk = out_of_memory_risk(needs, limits, int(needs * share))
    assert 0 <= out_of_memory_risk(needs, limits, int(needs * share * more)) <= risk <= 1


@given(NEEDS, BELOW, ABOVE)
def test_the_risk_at_exactly_the_predicted_need_is_one_half(needs: int, lower: float, upper: float) -> None:
    limits = (int(needs * lower), int(needs * upper))
    assert out_of_memory_risk(needs, limits, needs) == pytest.approx(0.5)
    assert out_of_memory_risk(needs, limits, least_capacity(needs, limits)) == pytest.approx(
        TIGHT_BELOW, abs=1e-3
    )


def test_the_verdict_changes_at_2_and_20_percent() -> None:
    assert [verdict_of(risk) for risk in (0.0199, 0.02, 0.1999, 0.2)] == [
        "fits",
        "tight",
        "tight",
        "does not fit",
    ]
