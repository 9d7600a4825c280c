"""Formatted figures for display next to the verdicts, per check and per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from checklist.registry import LOCALS
from checklist.result import CheckResult, Figure, Result

MAX_NAMES = 3  # maximum number of figures named per check
LOADED = {"sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, °C"}
REFERENCES = {  # by basis: of the reference in short, and of its source
    "floor": ("at least", "threshold"),
    "expectation": ("expected", "links and ports"),
    "peers": ("peers", "median of the peers in this run"),
    "history": ("earlier runs", "median of earlier runs"),
}
Row = tuple[str, ...]


def of_check(check: CheckResult) -> str:
    """Format a check's figures, e.g. "gemm_bf16 758 to 771 TFLOPS (at least 731)"; empty if none."""
    texts = []
    for name, figures in _largest_by_name(check).items():
        basis, expected = figures[0].basis, figures[0].expected
        reference = "" if expected is None else f" ({REFERENCES[basis][0]} {_reference(figures[0])})"
        texts.append(f"{name} {_span(figures)}{reference}")
    omitted = len(texts) - MAX_NAMES
    return ", ".join(texts[:MAX_NAMES]) + (f" and {omitted} more" if omitted > 0 else "")


def with_sources(result: Result) -> tuple[Row, ...]:
    """Return a row of each figure that has a reference: check, figure, measured, expected, source."""
    return tuple(
        (
            check.check,
            name,
            _span(figures),
            f"{REFERENCES[figures[0].basis][0]} {_reference(figures[0])}",
            figures[0].source or REFERENCES[figures[0].basis][1],
        )
        for check in result.checks
        for name, figures in _largest_by_name(check).items()
        if figures[0].expected is not None
    )


def by_rank(result: Result) -> tuple[Row, tuple[Row, ...]]:
    """Build a table of each rank's own figures: headers and rows; no rows without figures."""
    values_by_rank: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for local in result.measurements.locals:
        if local.value is not None:
            values_by_rank[local.rank][local.what].append(local.value)
    loaded = {state.rank: state for state in result.measurements.health if state.when == "loaded"}
    units = [field for field in LOADED if any(getattr(state, field) is not None for state in loaded.values())]
    kinds = [
        kind for kind in LOCALS.values() if any(kind.name in figures for figures in values_by_rank.values())
    ]
    nodes, names = result.measurements.nodes_by_rank, result.measurements.names
    headers = (
        "rank",
        "node",
        *(f"{kind.name}, {kind.unit}" for kind in kinds),
        *(LOADED[field] for field in units),
    )
    rows = tuple(
        (
            str(rank),
            names.get(nodes.get(rank, -1), ""),
            *(_cell(values_by_rank[rank][kind.name]) for kind in kinds),
            *(_cell([value] if (value := getattr(loaded.get(rank), field, None)) else []) for field in units),
        )
        for rank in sorted(values_by_rank)
    )
    return headers, rows


def amount(value: float, unit: str) -> str:
    """Format a figure with its unit; times in microseconds or milliseconds."""
    if unit != "s":
        return f"{_number(value)} {unit}"
    return (
        f"{value * 1e6:.0f} µs"
        if value < 1e-3
        else f"{value * 1e3:.3g} ms"
        if value < 1
        else f"{value:.3g} s"
    )


def _largest_by_name(check: CheckResult) -> dict[str, list[Figure]]:
    """Return a check's figures of the largest message, by name."""
    by_name: dict[str, list[Figure]] = defaultdict(list)
    for figure in check.figures:
        by_name[figure.name].append(figure)
    return {name: _largest(figures) for name, figures in by_name.items()}


def _largest(figures: Sequence[Figure]) -> list[Figure]:
    largest = max(figure.bytes or 0 for figure in figures)
    return [figure for figure in figures if (figure.bytes or 0) == largest]


def _reference(figure: Figure) -> str:
    return amount(figure.expected or 0.0, figure.unit).removesuffix(f" {figure.unit}")


def _span(figures: Sequence[Figure]) -> str:
    low_value, high_value = (pick(figure.value for figure in figures) for pick in (min, max))
    low, high = amount(low_value, figures[0].unit), amount(high_value, figures[0].unit)
    return high if low == high else f"{low.removesuffix(f' {figures[0].unit}')} to {high}"


def _cell(values: Sequence[float]) -> str:
    """Format a cell; for copies to several peers, the slowest."""
    return _number(min(values)) if values else ""


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
