"""Fit of ``estimator/data/residuals.csv`` to published measurements, written by ``refit.py``.

Each class of runs has three numbers: a factor on the bytes beyond the states that the formulas predict, and
the lower and upper end of the range around the result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published import rows
from estimator.memory.moments import peak
from estimator.memory.residuals import LIVE, VARYING, Residual, class_of, residual_of
from estimator.plan import GIB

# Quantile of a class's sources that is the likely value. It is above the median because underestimating a run
# costs more than overestimating it.
LEAN = 0.6
COVERED = 0.95  # of new sources, by each end of the range
# Quantile of a source's runs that is the source's score (for the lower end: 1 minus this)
WITHIN_A_SOURCE = 0.95
GIVEN = ("cpu", "DeepSpeed", VARYING)  # classes with too few scored runs; rows set manually
FEW = 5  # runs of quality A; a class with fewer takes those of quality B as well
# Minimum share of a measurement beyond the states for a run to be fitted: with 16 GiB of states and 1.6 GiB
# of other memory, an error of 1 % in the states changes the ratio by 10 %
TELLING = 0.15
FEW_SOURCES = 8  # a class with fewer takes the spread of all classes


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One published measurement of memory and the prediction of the formulas, in GiB."""

    id: str
    source: str
    engine: str
    method: str
    quality: str
    counter: str
    name: str  # of the class
    measured: float
    fixed: float  # states, and bytes that the allocator reserves in addition to live tensors
    dynamic: float  # activations, logits and buffers

    @property
    def ratio(self) -> float:
        """Measured over predicted dynamic memory; at least 0.05, as the fixed part may be overestimated."""
        return max((self.measured - self.fixed) / self.dynamic, 0.05)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a fit for one run, in GiB."""

    run: MeasuredRun
    likely: float
    upper: float

    @property
    def error(self) -> float:
        """Likely over measured, minus 1."""
        return self.likely / self.run.measured - 1


def runs_of(path: Path = rows.TABLE) -> list[MeasuredRun]:
    """Return the runs of a table of measurements whose memory can be scored."""
    runs = []
    for row in rows.read(path):
        if row.memory_skip or row.setup is None or row.gib is None or row.kind not in (*LIVE, "reserved"):
            continue
        counter = "live" if row.kind in LIVE else "held"
        held = counter == "held"
        largest = peak(row.setup, residual_of(row.setup, row.kind).factor, held=held)
        runs.append(
            MeasuredRun(
                id=row.id,
                source=row.source,
                engine=row.setup.engine,
                method=row.method,
                quality=row.quality,
                counter=counter,
                name=class_of(row.setup, counter),
                measured=row.gib,
                fixed=(largest.states_bytes + held * largest.beside) / GIB,
                dynamic=max(largest.dynamic_bytes / GIB, 1e-3),
            )
        )
    return runs


def fit(runs: Iterable[MeasuredRun], previous: Iterable[Residual]) -> dict[tuple[str, str], Residual]:
    """Fit factor and range of each class of runs; return them by (counter, class).

    ``previous``: the current rows of the table. They define the classes; rows of ``GIVEN`` are kept. Runs of
    one publication are correlated, so each source has one vote: factors are fitted to the sources' medians,
    ranges to the sources' scores. A class with fewer than two sources takes the factor of its counter's other
    classes; one with fewer than ``FEW_SOURCES`` takes their spread. An engine that no run of the class used
    takes the widest range of all classes.
    """
    all_runs, rows = list(runs), list(previous)
    fitted = {(row.counter, row.name) for row in rows if row.name not in GIVEN}
    factors = {key: _factor(all_runs, key, fitted) for key in fitted}
    ends = {key: _ends(all_runs, key, factors) for key in fitted}
    result = {}
    for row in rows:
        key = (row.counter, row.name)
        if key not in fitted:
            result[key] = row
            continue
        class_runs = _runs_of_class(all_runs, key)
        of_counter = [ends[other] for other in fitted if other[0] == row.counter]
        result[key] = Residual(
            counter=row.counter,
            name=row.name,
            factor=factors[key],
            lower=ends[key][0],
            upper=ends[key][1],
            lower_elsewhere=min(lower for lower, _ in of_counter),
            upper_elsewhere=max(upper for _, upper in of_counter),
            runs=len(class_runs),
            sources=len({run.source for run in class_runs}),
            engines=tuple(sorted({run.engine for run in class_runs})),
            basis=_basis(class_runs, all_runs),
        )
    return result


def _factor(runs: list[MeasuredRun], key: tuple[str, str], fitted: set[tuple[str, str]]) -> float:
    """Fit the factor of a class, at least 1.

    A class with one source takes the factor of all classes, as properties of that source can't be
    separated from those of the class.
    """
    class_runs = _runs_of_class(runs, key)
    if len({run.source for run in class_runs}) < 2:
        others = [run for run in runs if run.counter == key[0] and (run.counter, run.name) in fitted]
        class_runs = [run for run in others if run.quality == "A"]
    if not class_runs:
        return 1.0
    medians = [statistics.median(ratios) for ratios in _by_source(class_runs).values()]
    return max(round(_quantile(sorted(medians), LEAN), 2), 1.0)


def _ends(
    runs: list[MeasuredRun], key: tuple[str, str], factors: dict[tuple[str, str], float]
) -> tuple[float, float]:
    """Fit lower and upper end of a class's range, relative to its likely value.

    Student's prediction interval for the next source's score, from the winsorized logarithms of the sources'
    scores. With fewer than ``FEW_SOURCES`` sources, mean and spread are those of all sources of the counter.
    """
    own = _scores_of(runs, {key}, factors)
    if len(own) < FEW_SOURCES:
        own = _scores_of(runs, {other for other in factors if other[0] == key[0]}, factors)
    if len(own) < 2:
        return 0.5, 2.0
    lows, highs = (_winsorised(scores) for scores in zip(*own, strict=True))
    width = student(COVERED, len(own) - 1) * math.sqrt(1 + 1 / len(own))
    lower = statistics.mean(lows) - width * statistics.stdev(lows)
    upper = statistics.mean(highs) + width * statistics.stdev(highs)
    return min(round(math.exp(lower), 2), 1.0), max(round(math.exp(upper), 2), 1.0)


def _winsorised(scores: Iterable[float]) -> list[float]:
    """Winsorize the lowest and the highest score; fewer than four scores are returned unchanged."""
    ordered = sorted(scores)
    if len(ordered) < 4:
        return ordered
    return [ordered[1], *ordered[1:-1], ordered[-2]]


def _scores_of(
    runs: list[MeasuredRun], keys: set[tuple[str, str]], factors: dict[tuple[str, str], float]
) -> list[tuple[float, float]]:
    """Return low and high score of each source in these classes, as logarithms of measured over likely."""
    of_classes = [run for key in sorted(keys) for run in _runs_of_class(runs, key)]
    by_source: dict[str, list[float]] = {}
    for run in of_classes:
        by_source.setdefault(run.source, []).append(math.log(run.ratio / factors[run.counter, run.name]))
    return [
        (_quantile(sorted(ratios), 1 - WITHIN_A_SOURCE), _quantile(sorted(ratios), WITHIN_A_SOURCE))
        for ratios in by_source.values()
    ]


def _by_source(runs: Iterable[MeasuredRun]) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {}
    for run in runs:
        ratios.setdefault(run.source, []).append(run.ratio)
    return ratios


def student(share: float, freedom: int) -> float:
    """Return a quantile of Student's t by Cornish and Fisher's expansion in 1 / degrees of freedom (1938).

    Within 1 % of the exact value from 4 degrees of freedom on, 4 % below it for 2.
    """
    z = statistics.NormalDist().inv_cdf(share)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + (z**3 + z) / 4 / freedom + second / freedom**2


def _runs_of_class(runs: list[MeasuredRun], key: tuple[str, str]) -> list[MeasuredRun]:
    """Return a class's runs of quality A, and those of quality B if A has fewer than ``FEW``."""
    telling = [run for run in runs if run.dynamic >= TELLING * run.measured]
    of_class = [run for run in telling if (run.counter, run.name) == key]
    best = [run for run in of_class if run.quality == "A"]
    return best if len(best) >= FEW else [run for run in of_class if run.quality in ("A", "B")]


def _basis(class_runs: list[MeasuredRun], runs: list[MeasuredRun]) -> str:
    if not class_runs:
        return f"no published run of this kind; {len(runs)} of other kinds"
    sources = len({run.source for run in class_runs})
    return f"{sources} source" + ("s" if sources > 1 else "") + f" with {len(class_runs)} published runs"


def _quantile(ordered: list[float], share: float) -> float:
    """Return the quantile ``share`` of ordered values, linear between the two nearest."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def predict(runs: Iterable[MeasuredRun], residuals: dict[tuple[str, str], Residual]) -> list[Prediction]:
    """Predict each run's memory with the fitted residual of its counter and class."""
    predictions = []
    for run in runs:
        residual = residuals[run.counter, run.name]
        dynamic = run.dynamic * residual.factor
        upper = run.fixed + dynamic * residual.upper_for(run.engine)
        predictions.append(Prediction(run, run.fixed + dynamic, upper))
    return predictions


def held_out(runs: list[MeasuredRun], previous: list[Residual]) -> list[Prediction]:
    """Predict each source's runs with a fit to all other sources."""
    predictions = []
    for source in sorted({run.source for run in runs}):
        others = fit([run for run in runs if run.source != source], previous)
        predictions += predict([run for run in runs if run.source == source], others)
    return predictions


def score(predictions: list[Prediction]) -> dict[str, float]:
    """Compute the figures of ``compare``, as fractions.

    ``sources_covered``: the mean over sources of the share of their runs that the upper end covers.
    """
    errors = [prediction.error for prediction in predictions]
    size = sorted(abs(error) for error in errors)
    covered: dict[str, list[bool]] = {}
    for prediction in predictions:
        covered.setdefault(prediction.run.source, []).append(prediction.upper >= prediction.run.measured)
    flags = [flag for of_source in covered.values() for flag in of_source]
    return {
        "rows": len(errors),
        "median_abs_error": round(statistics.median(size), 4),
        "p95_abs_error": round(_quantile(size, 0.95), 4),
        "bias": round(statistics.median(errors), 4),
        "under_by_3pct": round(sum(error < -0.03 for error in errors) / len(errors), 4),
        "upper_covers": round(sum(flags) / len(flags), 4),
        "sources_covered": round(statistics.mean(sum(f) / len(f) for f in covered.values()), 4),
    }
