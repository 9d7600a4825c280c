"""Numbers of tokens as people write them."""

from __future__ import annotations

import pytest

from estimator.token_counts import parse


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20000", 20_000),
        ("20,000", 20_000),
        ("2.5k", 2500),
        ("300M", 3e8),
        ("1.5 t", 1.5e12),
        ("1e9", 1e9),
        ("5x", None),
        ("B", None),
        ("0", None),
        ("nan", None),
        ("", None),
    ],
)
def test_token_counts_are_parsed_with_units_and_other_text_is_refused(text: str, count: float | None) -> None:
    assert parse(text) == count
