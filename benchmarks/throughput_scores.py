"""Score a fit of published speeds by framework, GPU, recipe, method, kernels and source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks.published_speeds import Point
from estimator.setup import Setup
from estimator.throughput.efficiency import kernels

FITS = ("fitted", "source held out", "project held out", "architecture held out")


def summary(errors: Iterable[float | None]) -> dict[str, float | int | None]:
    errors = list(errors)
    errors_known = [math.expm1(error) for error in errors if error is not None]
    if not errors_known:
        return {
            "rows": 0,
            "unknown": len(errors),
            "median_abs_error": None,
            "p95_abs_error": None,
            "bias": None,
        }
    return {
        "rows": len(errors_known),
        "unknown": len(errors) - len(errors_known),
        "median_abs_error": round(float(np.median(np.abs(errors_known))), 4),
        "p95_abs_error": round(float(np.percentile(np.abs(errors_known), 95)), 4),
        "bias": round(float(np.median(errors_known)), 4),
    }


GROUPS: dict[str, Callable[[Point], str]] = {
    "framework": lambda point: point.row.framework,
    "GPU": lambda point: point.gpu.name,
    "precision of products": lambda point: point.setup.fp8 if point.setup.fp8 != "none" else "bf16",
    "method": lambda point: point.row.method,
    "kernels": lambda point: kernels(point.setup),
    "parallelism": lambda point: parallelism(point.setup),
    "quality": lambda point: point.row.quality,
    "source": lambda point: point.row.source,
}


def parallelism(setup: Setup) -> str:
    """Return the parallel degrees above 1 as text."""
    kinds = {
        "tensor": setup.tensor,
        "pipeline": setup.pipeline,
        "context": setup.context,
        "expert": setup.expert,
    }
    named = [name for name, degree in kinds.items() if degree > 1]
    if setup.world_size == 1:
        return "one GPU"
    return " + ".join(named) or ("data, several nodes" if setup.nodes > 1 else "data, one node")


def scores(data: Sequence[Point], errors: dict[str, list[float | None]]) -> dict[str, object]:
    groups: dict[str, object] = {"all": {name: summary(values) for name, values in errors.items()}}
    for title, by in GROUPS.items():
        keys = [by(point) for point in data]
        groups[title] = {
            key: {
                name: summary(value for value, other in zip(values, keys, strict=True) if other == key)
                for name, values in errors.items()
            }
            for key, _ in Counter(keys).most_common()
        }
    return groups


def markdown(all_scores: dict[str, object]) -> str:
    lines = [
        "# Predicted tokens/s against published ones",
        "",
        "Median and 95th percentile of |predicted / measured - 1|, and the median of the signed error.",
        "*Fitted*: a fit to all rows. *Source held out*: a fit without the row's source (one commit of one",
        "project). *Project held out*: without all sources of the project. *Architecture held out*: without",
        "GPUs of the row's architecture. *Unknown*: rows with an 8- or 4-bit recipe published, with such",
        "kernels, by their own source only: the fit without that source has no speed for them.",
        "`python -m benchmarks.fit_throughput` writes this.",
    ]
    for title, groups in all_scores.items():
        if title == "rows":
            continue
        table = {"all": groups} if title == "all" else groups
        assert isinstance(table, dict)
        lines += ["", f"## By {title}" if title != "all" else "## All", ""]
        lines += [
            f"| | rows | {' | '.join(f'{name}: median | p95 | bias' for name in FITS)} | unknown |",
            f"|---|---|{'---|' * (3 * len(FITS) + 1)}",
        ]
        for key, score in table.items():
            cells = [str(score["fitted"]["rows"])]
            for name in FITS:
                cells += [
                    _percent(score[name][part]) for part in ("median_abs_error", "p95_abs_error", "bias")
                ]
            lines.append(f"| {key} | {' | '.join(cells)} | {score['source held out']['unknown']} |")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f} %"


PERCENTILES = (2.5, 10, 90, 97.5)  # the outer two are the ends of the stated range


def spread(errors: Iterable[float | None]) -> dict[float, float]:
    """Return measured over predicted at each of :data:`PERCENTILES`."""
    ratios = [math.exp(-error) for error in errors if error is not None]
    return dict(zip(PERCENTILES, map(float, np.percentile(ratios, PERCENTILES)), strict=True))


FEWEST_ROWS, FEWEST_COVERED = 5, 0.9  # a kind of runs below has a separate range


def own_ranges(errors: Sequence[float | None], kinds: Sequence[str]) -> dict[str, dict[float, float]]:
    """Return percentiles of measured over predicted of kinds of runs that the common range rarely holds."""
    ends = spread(errors)
    low, high = ends[PERCENTILES[0]], ends[PERCENTILES[-1]]
    ranges = {}
    for kind in sorted(set(kinds)):
        own = [error for error, name in zip(errors, kinds, strict=True) if name == kind and error is not None]
        inside = sum(low <= math.exp(-error) <= high for error in own)
        if len(own) >= FEWEST_ROWS and inside < FEWEST_COVERED * len(own):
            ranges[kind] = spread(own)
    return ranges


def covered(errors: Sequence[float | None], groups: Sequence[str]) -> float:
    """Return the share of rows inside the range that the errors of the other groups give."""
    pairs = [(error, group) for error, group in zip(errors, groups, strict=True) if error is not None]
    inside = 0
    for name in set(groups):
        ends = spread(error for error, group in pairs if group != name)
        low, high = ends[PERCENTILES[0]], ends[PERCENTILES[-1]]
        inside += sum(low <= math.exp(-error) <= high for error, group in pairs if group == name)
    return round(inside / len(pairs), 4)
