"""Numbers of tokens as people write them."""

from __future__ import annotations

_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse(text: str) -> float | None:
    """Parse a number of tokens such as 250M, 1.5B, 1e9 or 20,000; None unless it is a number above 0."""
    cleaned = text.strip().lower().replace(",", "").replace("_", "")
    unit = cleaned[-1:] if cleaned[-1:] in _SIZES and not cleaned[-1:].isdigit() else ""
    try:
        value = float(cleaned.removesuffix(unit)) * _SIZES[unit]
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
