"""Fits the coefficients of estimator/data/efficiency.csv to published tokens/s, and scores them.

    python -m benchmarks.fit_throughput            # minutes; writes the table and benchmarks/results
    python -m benchmarks.fit_throughput --score    # scores the table as it is

Two scores: on the rows that were fitted, and on each source's rows by a fit that never saw that source (in
addition by a fit that never saw any source of that project). A row that such a fit knows no coefficient for
(a GPU architecture or an 8-bit recipe that only the left-out source has) is unknown there, and counted.

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
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.throughput_coefficients import SPECS
from estimator import throughput
from estimator.hardware.catalogue import Gpu
from estimator.published import rows
from estimator.published.compare import usual_network
from estimator.setup import Setup
from estimator.throughput.communication import Links, links
from estimator.throughput.efficiency import (
    TABLE,
    Coefficient,
    Efficiency,
    chips,
    kernels,
    published,
    recipes,
)
from estimator.throughput.flops import Work, work

MEASURED = TABLE.with_name("measured.csv")
RESULTS = Path(__file__).parent / "results"
ROBUST = 0.10  # log error beyond which a row pulls no harder
QUALITY = {"A": 1.0, "B": 0.7, "C": 0.2}  # weight of a row by its quality in the table
TOUCHED = 0.02  # share of the time that a coefficient must move to count a row as its evidence

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One published run."""

    row: rows.PublishedRow
    setup: Setup
    gpu: Gpu
    network_gbps: float | None
    rdma: bool

    @property
    def project(self) -> str:
        return self.row.source.split("@")[0]

    @cached_property
    def load(self) -> Work:
        return work(self.setup)

    @cached_property
    def wires(self) -> Links:
        return links(self.setup, self.gpu, network_gbps=self.network_gbps, rdma=self.rdma)


def points() -> list[Point]:
    """The rows of the package's table that can be predicted."""
    found = []
    for row in rows.read(MEASURED):
        if row.throughput_skip or row.setup is None or row.gpu is None or not row.tps_per_gpu:
            continue
        gbps, rdma = usual_network(row.gpu, row.setup.processes_per_node)
        if row.network_gbps is not None:
            gbps, rdma = row.network_gbps, True
        found.append(Point(row, row.setup, row.gpu, gbps, rdma))
    return found


def log_error(point: Point, table: Efficiency) -> float | None:
    """Log of predicted over measured tokens/s of one GPU; None where there is no prediction."""
    found = throughput.speed(
        point.setup, point.gpu, network_gbps=point.network_gbps, rdma=point.rdma, efficiency=table
    )
    if found.tokens_per_second is None or not point.row.tps_per_gpu:
        return None
    return math.log(found.tokens_per_second / point.setup.world_size / point.row.tps_per_gpu)


def residual(point: Point, table: Efficiency) -> float:
    """As :func:`log_error`, for a table that has every coefficient; 0 where a link is unknown."""
    parts = throughput.step(point.setup, point.load, point.gpu, point.wires, table)
    setup, measured = point.setup, point.row.tps_per_gpu
    if parts is None or not measured:
        return 0.0
    tokens = setup.sequences * setup.seq_len * setup.data_parallel * setup.accumulation
    return math.log(tokens / parts.total / setup.world_size / measured)


def table_of(values: Array) -> Efficiency:
    return Efficiency(
        {
            (spec.name, spec.scope): Coefficient(float(value), 0, "")
            for spec, value in zip(SPECS, values, strict=True)
        }
    )


def without_evidence(table: Efficiency, train: Sequence[Point]) -> Efficiency:
    """The table as it would be had the fit known these runs alone: no row of what none of them shows."""
    seen = {scope for point in train for scope in chips(point.gpu)}
    known = {scope for point in train for scope in recipes(point.setup, point.gpu)}
    kept = {
        (name, scope): value
        for (name, scope), value in table.table.items()
        if not (name == "products of" and scope not in seen)
        and not (name == "gain" and scope not in known)
    }
    return Efficiency(kept)


# ---------------------------------------------------------------------------------------------------------
# The fit


def fit(train: Sequence[Point], start: Array | None = None, steps: int = 14) -> Array:
    """Values of SPECS that fit ``train`` best."""
    prior = np.array([math.log(spec.prior) for spec in SPECS])
    width = np.array([spec.width for spec in SPECS])
    free = [index for index, spec in enumerate(SPECS) if spec.fitted]
    theta = prior.copy() if start is None else np.log(start)
    sizes = Counter(point.row.source for point in train)
    weights = np.array([QUALITY[p.row.quality] / math.sqrt(sizes[p.row.source]) for p in train])
    damping = 1.0
    touched = _touched(train, theta, free)
    now = _residuals(train, theta)
    for _ in range(steps):
        slopes = _slopes(train, theta, now, free, touched)
        pull = weights / np.maximum(np.abs(now), ROBUST) / ROBUST
        normal = slopes.T @ (slopes * pull[:, None])
        right = -slopes.T @ (pull * now) - (theta - prior)[free] / width[free] ** 2
        normal[np.diag_indices(len(free))] += 1 / width[free] ** 2
        while damping < 1e6:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), right)
            tried = theta.copy()
            tried[free] += np.clip(move, -0.5, 0.5)
            then = _residuals(train, tried)
            if _loss(then, weights, tried, prior, width) < _loss(now, weights, theta, prior, width):
                damping /= 5
                break
            damping *= 5
        else:
            break
        settled = float(np.max(np.abs(tried - theta))) < 1e-3
        theta, now = tried, then
        if settled:
            break
    fitted: Array = np.exp(theta)
    return fitted


def _residuals(train: Sequence[Point], theta: Array) -> Array:
    table = table_of(np.exp(theta))
    return np.array([residual(point, table) for point in train])


def _touched(train: Sequence[Point], theta: Array, free: Sequence[int]) -> dict[int, list[int]]:
    """By coefficient, the rows that it has a part in; the others need not be looked at again."""
    now = _residuals(train, theta)
    touched = {}
    for index in free:
        moved = theta.copy()
        moved[index] += 1.0
        touched[index] = [int(row) for row in np.flatnonzero(_residuals(train, moved) != now)]
    return touched


def _slopes(
    train: Sequence[Point], theta: Array, now: Array, free: Sequence[int], touched: dict[int, list[int]]
) -> Array:
    slopes = np.zeros((len(train), len(free)))
    for column, index in enumerate(free):
        moved = theta.copy()
        moved[index] += 0.02
        table = table_of(np.exp(moved))
        for row in touched[index]:
            slopes[row, column] = (residual(train[row], table) - now[row]) / 0.02
    return slopes


def _loss(errors: Array, weights: Array, theta: Array, prior: Array, width: Array) -> float:
    """Huber's loss of the rows and the prior's."""
    size = np.abs(errors)
    rows_loss = np.where(size < ROBUST, size**2 / 2, ROBUST * (size - ROBUST / 2)) / ROBUST**2
    return float(weights @ rows_loss + np.sum(((theta - prior) / width) ** 2) / 2)


# ---------------------------------------------------------------------------------------------------------
# Scores


def held_out(data: Sequence[Point], fitted: Array, group: Callable[[Point], str]) -> list[float | None]:
    """Log error of each row by a fit that never saw its group."""
    errors: list[float | None] = [None] * len(data)
    for name in dict.fromkeys(map(group, data)):
        train = [point for point in data if group(point) != name]
        table = without_evidence(table_of(fit(train, fitted, steps=6)), train)
        for index, point in enumerate(data):
            if group(point) == name:
                errors[index] = log_error(point, table)
    return errors


def summary(errors: Iterable[float | None]) -> dict[str, float | int | None]:
    errors = list(errors)
    known = [math.expm1(error) for error in errors if error is not None]
    if not known:
        return {
            "rows": 0,
            "unknown": len(errors),
            "median_abs_error": None,
            "p95_abs_error": None,
            "bias": None,
        }
    return {
        "rows": len(known),
        "unknown": len(errors) - len(known),
        "median_abs_error": round(float(np.median(np.abs(known))), 4),
        "p95_abs_error": round(float(np.percentile(np.abs(known), 95)), 4),
        "bias": round(float(np.median(known)), 4),
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
    """Kinds that are above 1, in words."""
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
    found: dict[str, object] = {"all": {name: summary(values) for name, values in errors.items()}}
    for title, by in GROUPS.items():
        keys = [by(point) for point in data]
        found[title] = {
            key: {
                name: summary(value for value, other in zip(values, keys, strict=True) if other == key)
                for name, values in errors.items()
            }
            for key, _ in Counter(keys).most_common()
        }
    return found


def markdown(found: dict[str, object]) -> str:
    lines = [
        "# Predicted tokens/s against published ones",
        "",
        "Median and 95th percentile of |predicted / measured - 1|, and the median of the signed error.",
        "*Fitted*: the rows were fitted. *Source held out*: by a fit that never saw the row's source (one",
        "commit of one project). *Project held out*: that never saw any source of the project. Rows whose",
        "GPU architecture or 8-bit recipe nobody else has published are unknown to such a fit.",
        "`python -m benchmarks.fit_throughput` writes this.",
    ]
    names = ("fitted", "source held out", "project held out")
    for title, groups in found.items():
        if title == "rows":
            continue
        table = {"all": groups} if title == "all" else groups
        assert isinstance(table, dict)
        lines += ["", f"## By {title}" if title != "all" else "## All", ""]
        lines += [
            f"| | rows | {' | '.join(f'{name}: median | p95 | bias' for name in names)} | unknown |",
            f"|---|---|{'---|' * 10}",
        ]
        for key, score in table.items():
            cells = [str(score["fitted"]["rows"])]
            for name in names:
                cells += [
                    _percent(score[name][part]) for part in ("median_abs_error", "p95_abs_error", "bias")
                ]
            lines.append(f"| {key} | {' | '.join(cells)} | {score['project held out']['unknown']} |")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f} %"


# ---------------------------------------------------------------------------------------------------------
# The table


def write_table(data: Sequence[Point], values: Array, ranges: tuple[float, float]) -> None:
    """efficiency.csv, with the evidence behind each coefficient."""
    theta = np.log(values)
    every = list(range(len(SPECS)))
    slopes = _slopes(data, theta, _residuals(data, theta), every, _touched(data, theta, every))
    lines: list[list[str]] = []
    for index, (spec, value) in enumerate(zip(SPECS, values, strict=True)):
        evidence = [p for p, slope in zip(data, slopes[:, index], strict=True) if abs(slope) > TOUCHED]
        source = spec.source or _sources(evidence) or "its prior; no published run shows it"
        lines.append(
            [spec.name, spec.scope, f"{value:.4g}", str(len(evidence)), source, spec.meaning_in_words]
        )
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
    text = "tokens/s over predicted that a tenth of the runs lie below, their source left out of the fit"
    for scope, value in zip(("p10", "p90"), ranges, strict=True):
        lines.append(
            ["range", scope, f"{value:.3f}", str(len(data)), "benchmarks/results/throughput_fit.md", text]
        )
        text = text.replace("below", "above")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["coefficient", "scope", "value", "rows", "source", "meaning"])
        writer.writerows(lines)


def _sources(evidence: Iterable[Point]) -> str:
    """Projects, most rows first."""
    return "; ".join(name for name, _ in Counter(point.project for point in evidence).most_common(4))


def spread(errors: Iterable[float | None]) -> tuple[float, float]:
    """Measured over predicted at the 10th and 90th percentile."""
    ratios = [math.exp(-error) for error in errors if error is not None]
    low, high = np.percentile(ratios, [10, 90])
    return float(low), float(high)


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
    errors["source held out"] = held_out(data, values, lambda point: point.row.source)
    errors["project held out"] = held_out(data, values, lambda point: point.project)
    write_table(data, values, spread(errors["source held out"]))
    found = scores(data, errors)
    found["rows"] = {
        point.row.id: [
            None if error[index] is None else round(math.expm1(error[index] or 0.0), 3)
            for error in errors.values()
        ]
        for index, point in enumerate(data)
    }
    (RESULTS / "throughput_fit.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "throughput_fit.md").write_text(markdown(found), encoding="utf-8")
    print(json.dumps(found["all"], indent=1))


if __name__ == "__main__":
    main()
