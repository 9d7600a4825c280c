"""Fit the coefficients of estimator/data/efficiency.csv to published tokens/s, and score them.

    python -m benchmarks.fit_throughput            # minutes; writes the table and benchmarks/results
    python -m benchmarks.fit_throughput --score    # scores the table as it is

Scores: on the rows that were fitted, and on each source's rows by a fit that never saw that source (in
addition by fits that never saw any source of that project, or a GPU of that architecture). A row whose 8- or
4-bit recipe only the left-out rows have, in such kernels, is unknown there, and counted.

Each coefficient has a physical prior and a width; the fit is Gauss-Newton on log errors, robust against
outliers (absolute beyond 10 %), with sources weighted by the root of their number of rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_speeds import Point, points
from benchmarks.throughput_coefficients import SPECS
from benchmarks.throughput_scores import covered, markdown, own_ranges, scores, spread, summary
from estimator import throughput
from estimator.throughput.efficiency import (
    TABLE,
    Coefficient,
    Efficiency,
    chips,
    kernels,
    published,
    range_scope,
    recipes,
)

RESULTS = Path(__file__).parent / "results"
PAGE = "throughput_fit.md"
ROBUST = 0.10  # log error beyond which a row pulls no harder
QUALITY = {"A": 1.0, "B": 0.7, "C": 0.2}  # weight of a row by its quality in the table
TOUCHED = 0.02  # share of the time that a coefficient must move to count a row as its evidence

Array = NDArray[np.float64]


def log_error(point: Point, table: Efficiency) -> float | None:
    """Return the log of predicted over measured tokens/s of one GPU; None without a prediction."""
    speed = throughput.speed(
        point.setup, point.gpu, network_gbps=point.network_gbps, rdma=point.rdma, efficiency=table
    )
    if speed.tokens_per_second is None or not point.row.tps_per_gpu:
        return None
    return math.log(speed.tokens_per_second / point.setup.world_size / point.row.tps_per_gpu)


def residual(point: Point, table: Efficiency) -> float:
    """Return :func:`log_error` for a table that has every coefficient; 0 if a link is unknown."""
    setup, measured = point.setup, point.row.tps_per_gpu
    if point.times is None or not measured:
        return 0.0
    parts = throughput.step(setup, point.load, point.gpu, point.times, table)
    tokens = setup.sequences * setup.seq_len * setup.data_parallel * setup.accumulation
    return math.log(tokens / parts.total / setup.world_size / measured)


def table_of(values: Array, *, capped: bool = True) -> Efficiency:
    coefficients = {
        (spec.name, spec.scope): Coefficient(float(value), 0, "")
        for spec, value in zip(SPECS, values, strict=True)
    }
    return Efficiency(coefficients, capped)


def without_evidence(table: Efficiency, train: Sequence[Point]) -> Efficiency:
    """Return the table that a fit to ``train`` alone could give: no row without evidence in these runs."""
    chip_scopes = {scope for point in train for scope in chips(point.gpu)}
    recipe_scopes = {scope for point in train for scope in recipes(point.setup, point.gpu)}
    rows = {
        (name, scope): value
        for (name, scope), value in table.table.items()
        if not (name == "products of" and scope not in chip_scopes)
        and not (name == "gain" and scope not in recipe_scopes)
    }
    return Efficiency(rows)


# ---------------------------------------------------------------------------------------------------------
# The fit


@dataclass(frozen=True)
class Linearization:
    """Residuals of published runs at one set of coefficients, and their slopes by coefficient."""

    dependent_rows: dict[int, list[int]]
    """Rows that depend on each coefficient; only these are evaluated again."""
    residuals: Array
    slopes: Array
    """Rows by coefficients, in the order of ``dependent_rows``."""

    @classmethod
    def at(cls, data: Sequence[Point], theta: Array, coefficients: Sequence[int]) -> Linearization:
        residuals = _residuals(data, theta)
        dependent_rows = {}
        for index in coefficients:
            shifted = theta.copy()
            shifted[index] += 1.0
            dependent_rows[index] = [
                int(row) for row in np.flatnonzero(_residuals(data, shifted) != residuals)
            ]
        return cls(dependent_rows, residuals, _slopes(data, theta, residuals, dependent_rows))

    def of(self, rows: Sequence[int]) -> Linearization:
        """Return the part of these rows."""
        place = {row: index for index, row in enumerate(rows)}
        dependent_rows = {
            index: [place[row] for row in depending if row in place]
            for index, depending in self.dependent_rows.items()
        }
        return Linearization(dependent_rows, self.residuals[rows], self.slopes[rows])


def free_coefficients() -> list[int]:
    """Return the places in SPECS of the coefficients that are fitted."""
    return [index for index, spec in enumerate(SPECS) if spec.fitted]


def fit(
    train: Sequence[Point],
    start: Array | None = None,
    steps: int = 14,
    first: Linearization | None = None,
) -> Array:
    """Fit the values of SPECS to ``train``. ``first``: linearization at ``start``, if it is known."""
    prior = np.array([math.log(spec.prior) for spec in SPECS])
    width = np.array([spec.width for spec in SPECS])
    free = free_coefficients()
    theta = prior.copy() if start is None else np.log(start)
    sizes = Counter(point.row.source for point in train)
    weights = np.array([QUALITY[p.row.quality] / math.sqrt(sizes[p.row.source]) for p in train])
    damping = 1.0
    first = first or Linearization.at(train, theta, free)
    residuals, slopes = first.residuals, first.slopes
    for step in range(steps):
        if step:
            slopes = _slopes(train, theta, residuals, first.dependent_rows)
        huber_weights = weights / np.maximum(np.abs(residuals), ROBUST) / ROBUST
        normal = slopes.T @ (slopes * huber_weights[:, None])
        gradient = -slopes.T @ (huber_weights * residuals) - (theta - prior)[free] / width[free] ** 2
        normal[np.diag_indices(len(free))] += 1 / width[free] ** 2
        while damping < 1e6:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = theta.copy()
            trial[free] += np.clip(move, -0.5, 0.5)
            trial_residuals = _residuals(train, trial)
            if _loss(trial_residuals, weights, trial, prior, width) < _loss(
                residuals, weights, theta, prior, width
            ):
                damping /= 5
                break
            damping *= 5
        else:
            break
        settled = float(np.max(np.abs(trial - theta))) < 1e-3
        theta, residuals = trial, trial_residuals
        if settled:
            break
    fitted: Array = np.exp(theta)
    return fitted


def _residuals(train: Sequence[Point], theta: Array) -> Array:
    table = table_of(np.exp(theta), capped=False)
    return np.array([residual(point, table) for point in train])


def _slopes(
    train: Sequence[Point], theta: Array, residuals: Array, dependent_rows: dict[int, list[int]]
) -> Array:
    slopes = np.zeros((len(train), len(dependent_rows)))
    for column, (index, rows) in enumerate(dependent_rows.items()):
        shifted = theta.copy()
        shifted[index] += 0.02
        table = table_of(np.exp(shifted), capped=False)
        for row in rows:
            slopes[row, column] = (residual(train[row], table) - residuals[row]) / 0.02
    return slopes


def _loss(errors: Array, weights: Array, theta: Array, prior: Array, width: Array) -> float:
    """Return Huber's loss of the rows plus that of the prior."""
    size = np.abs(errors)
    rows_loss = np.where(size < ROBUST, size**2 / 2, ROBUST * (size - ROBUST / 2)) / ROBUST**2
    return float(weights @ rows_loss + np.sum(((theta - prior) / width) ** 2) / 2)


class HeldOut:
    """Fits without groups of rows; groups of the same rows share one fit."""

    def __init__(self, data: Sequence[Point], fitted: Array) -> None:
        self.data, self.fitted = data, fitted
        self._first = Linearization.at(data, np.log(fitted), free_coefficients())
        self._tables: dict[tuple[int, ...], Efficiency] = {}

    def errors(self, group: Callable[[Point], str]) -> list[float | None]:
        """Return the log error of each row by a fit without the row's group."""
        names = [group(point) for point in self.data]
        errors: list[float | None] = [None] * len(names)
        for name in dict.fromkeys(names):
            table = self._table([row for row, other in enumerate(names) if other != name])
            for row, point in enumerate(self.data):
                if names[row] == name:
                    errors[row] = log_error(point, table)
        return errors

    def _table(self, rows: list[int]) -> Efficiency:
        key = tuple(rows)
        if key not in self._tables:
            train = [self.data[row] for row in rows]
            values = fit(train, self.fitted, steps=6, first=self._first.of(rows))
            self._tables[key] = without_evidence(table_of(values), train)
        return self._tables[key]


# ---------------------------------------------------------------------------------------------------------
# The table


def write_table(
    data: Sequence[Point], values: Array, known: Sequence[float | None], unseen: Sequence[float | None]
) -> None:
    """Write efficiency.csv, with the evidence behind each coefficient.

    ``known`` and ``unseen``: log errors of fits that never saw the row's source, or GPU architecture.
    """
    theta = np.log(values)
    slopes = Linearization.at(data, theta, range(len(SPECS))).slopes
    lines: list[list[str]] = []
    for index, (spec, value) in enumerate(zip(SPECS, values, strict=True)):
        evidence = [p for p, slope in zip(data, slopes[:, index], strict=True) if abs(slope) > TOUCHED]
        source = spec.source or _sources(evidence) or "its prior; no published run shows it"
        lines.append([spec.name, spec.scope, f"{value:.4g}", str(len(evidence)), source, spec.meaning])
    runs: dict[str, list[Point]] = {}
    for point in data:
        method = "adapters" if point.setup.adapters else "full training"
        architecture = point.gpu.architecture or ""
        for scope in (architecture, point.gpu.name, f"{architecture} {kernels(point.setup)} {method}"):
            runs.setdefault(scope, []).append(point)
    for scope, evidence in sorted(runs.items()):
        lines.append(
            ["runs", scope, "1", str(len(evidence)), _sources(evidence), "published runs of this kind"]
        )
    kinds = [range_scope(point.setup) for point in data]
    ranges = [("", "source", spread(known)), ("unseen ", "GPU architecture", spread(unseen))]
    ranges += [(f"{kind} ", "source", spans) for kind, spans in own_ranges(known, kinds).items()]
    for prefix, excluded, spans in ranges:
        count = kinds.count(prefix.strip()) or len(data)
        for percentile, value in spans.items():
            share = f"{percentile:g} % of the runs lie below" if percentile < 50 else ""
            share = share or f"{100 - percentile:g} % of the runs lie above"
            text = f"tokens/s over predicted that {share}, their {excluded} left out"
            page = f"benchmarks/{RESULTS.name}/{PAGE}"
            lines.append(["range", f"{prefix}p{percentile:g}", f"{value:.3f}", str(count), page, text])
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["coefficient", "scope", "value", "rows", "source", "meaning"])
        writer.writerows(lines)


def _sources(evidence: Iterable[Point]) -> str:
    """List projects, most rows first."""
    return "; ".join(name for name, _ in Counter(point.project for point in evidence).most_common(4))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--score", action="store_true", help="score the table as it is, without a fit")
    chosen = parser.parse_args()
    data = points()
    if chosen.score:
        print(json.dumps(summary(log_error(point, published()) for point in data)))
        return
    values = fit(data)
    table = table_of(values)
    errors: dict[str, list[float | None]] = {"fitted": [log_error(point, table) for point in data]}
    held_out = HeldOut(data, values)
    errors["source held out"] = held_out.errors(lambda point: point.row.source)
    errors["project held out"] = held_out.errors(lambda point: point.project)
    errors["architecture held out"] = held_out.errors(lambda point: point.gpu.architecture or "")
    write_table(data, values, errors["source held out"], errors["architecture held out"])
    all_scores = scores(data, errors)
    held, sources = errors["source held out"], [point.row.source for point in data]
    all_scores["all"]["source held out"]["covered"] = covered(held, sources)  # type: ignore[index]
    all_scores["rows"] = {
        point.row.id: [
            None if error[index] is None else round(math.expm1(error[index] or 0.0), 3)
            for error in errors.values()
        ]
        for index, point in enumerate(data)
    }
    (RESULTS / "throughput_fit.json").write_text(json.dumps(all_scores, indent=1) + "\n", encoding="utf-8")
    (RESULTS / PAGE).write_text(markdown(all_scores), encoding="utf-8")
    print(json.dumps(all_scores["all"], indent=1))


if __name__ == "__main__":
    main()
