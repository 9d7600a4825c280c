"""One formatter for each kind of figure."""

from __future__ import annotations

import pytest

from estimator.formatting import GIB, MIB, format_bytes, format_clock, format_duration, format_usd


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "unknown"),
        (0, "0 MiB"),
        (64 * MIB, "64 MiB"),
        (0.5 * GIB, "0.50 GiB"),
        (9.25 * GIB, "9.25 GiB"),
        (79.19 * GIB, "79.2 GiB"),
        (2048 * GIB, "2,048.0 GiB"),
    ],
)
def test_a_size_has_three_significant_digits_in_a_readable_unit(size: float | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.21, "4.2 s"),
        (45, "45 s"),
        (120, "2 min"),
        (5400, "90 min"),
        (12_600, "3.5 h"),
        (3e6, "34.7 days"),
        (4e6, "46.3 days"),
        (437e6, "13.8 years"),
    ],
)
def test_a_duration_is_in_its_natural_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.0, "0:59"), (59.1, "1:00"), (123, "2:03"), (3599.5, "1:00:00"), (3723, "1:02:03")],
)
def test_format_clock_rounds_up_to_the_next_second(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def test_an_amount_of_money_has_cents_or_two_significant_digits() -> None:
    assert (format_usd(1234.5), format_usd(None), format_usd(0.0)) == ("$1,234.50", "unknown", "$0.00")
    assert (format_usd(0.0123), format_usd(0.000412), format_usd(3.04e-7)) == (
        "$0.01",
        "$0.00041",
        "$0.0000003",
    )
