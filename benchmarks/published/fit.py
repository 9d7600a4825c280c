"""Fit of ``estimator/data/residuals.csv`` to published measurements, written by ``refit.py``.

Each class of runs has three numbers: a factor on the bytes beyond the states that the formulas predict, and
the lower and upper end of the range around the result.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.published.rows import PublishedRow
from benchmarks.published.scoring import ROUNDED
from estimator.memory.moments import peak
from estimator.memory.residuals import LIVE, Residual, class_of, residual_of
from estimator.plan import GIB

# Quantile of a class's sources that is the likely value. It is above the median because underestimating a run
# costs more than overestimating it.
LEAN = 0.6
OUTSIDE = 0.02  # share of the fitted runs beyond each end; of new sources it is about twice as many
GIVEN = ("cpu",)  # classes with too few scored runs; rows set manually
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
    method: str
    quality: str
    counter: str
    name: str  # name of the class of runs
    measured: float
    fixed: float  # predicted states
    dynamic: float  # predicted activations, logits, buffers, and the allocator's reserve

    @property
    def ratio(self) -> float:
        """Measured over predicted dynamic memory; at least 0.05, as the fixed part may be overestimated."""
        return max((self.measured - self.fixed) / self.dynamic, 0.05)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a fit for one run, in GiB."""

    run: MeasuredRun
    likely: float
    lower: float
    upper: float

    @property
    def covered(self) -> bool:
        """Whether the range holds the measurement; tables round it to 0.1 GiB or 3 digits."""
        rounding = ROUNDED * self.run.measured
        return self.lower - rounding <= self.run.measured <= self.upper + rounding

    @property
    def error(self) -> float:
        """Likely over measured, minus 1."""
        return self.likely / self.run.measured - 1


def runs_of(table: Iterable[PublishedRow]) -> list[MeasuredRun]:
    """Return the rows of a table of measurements whose memory can be scored."""
    runs = []
    for row in table:
        if row.memory_skip or row.setup is None or row.gib is None or row.kind not in (*LIVE, "reserved"):
            continue
        counter = "live" if row.kind in LIVE else "held"
        held = counter == "held"
        largest = peak(row.setup, residual_of(row.setup, row.kind).factor, held=held)
        runs.append(
            MeasuredRun(
                id=row.id,
                source=row.source,
                method=row.method,
                quality=row.quality,
                counter=counter,
                name=class_of(row.setup, counter),
                measured=row.gib,
                fixed=largest.states_bytes / GIB,
                dynamic=max((largest.dynamic_bytes + held * largest.reserved_extra) / GIB, 1e-3),
            )
        )
    return runs


def fit(runs: Iterable[MeasuredRun], previous: Iterable[Residual]) -> dict[tuple[str, str], Residual]:
    """Fit factor and range of each class of runs; return them by (counter, class).

    ``previous``: the current rows of the table. They define the classes; rows of ``GIVEN`` are kept. Runs of
    one publication are correlated: factors are fitted to the sources' medians, and in the quantiles of the
    ranges each source has the root of its number of runs as weight. A class with fewer than two sources takes
    the factor of its counter's other classes; one with fewer than ``FEW_SOURCES`` takes their range.
    """
    all_runs, rows = list(runs), list(previous)
    fitted = {(row.counter, row.name) for row in rows if row.name not in GIVEN}
    factors = {key: _factor(all_runs, key, fitted) for key in fitted}
    result = {}
    for row in rows:
        key = (row.counter, row.name)
        if key not in fitted:
            result[key] = row
            continue
        class_runs = _telling(all_runs, {key})
        lower, upper = _ends(all_runs, key, factors)
        result[key] = Residual(
            counter=row.counter,
            name=row.name,
            factor=factors[key],
            lower=lower,
            upper=upper,
            runs=len(class_runs),
            sources=len({run.source for run in class_runs}),
            basis=_basis(class_runs, all_runs),
        )
    return result


def _factor(runs: list[MeasuredRun], key: tuple[str, str], fitted: set[tuple[str, str]]) -> float:
    """Fit the factor of a class, at least 1.

    A class with one source takes the factor of all classes, as properties of that source cannot be
    separated from those of the class.
    """
    class_runs = _runs_of_class(runs, key)
    if len({run.source for run in class_runs}) < 2:
        other_runs = [run for run in runs if run.counter == key[0] and (run.counter, run.name) in fitted]
        class_runs = [run for run in other_runs if run.quality == "A"]
    if not class_runs:
        return 1.0
    medians = [statistics.median(ratios) for ratios in _by_source(class_runs).values()]
    return max(round(_quantile(sorted(medians), LEAN), 2), 1.0)


def _ends(
    runs: list[MeasuredRun], key: tuple[str, str], factors: dict[tuple[str, str], float]
) -> tuple[float, float]:
    """Fit lower and upper end of a class's range, relative to its likely value.

    They are weighted quantiles of measured over likely. With fewer than ``FEW_SOURCES`` sources, they are
    those of all classes of the counter.
    """
    telling = _telling(runs, {key})
    if len({run.source for run in telling}) < FEW_SOURCES:
        telling = _telling(runs, {other for other in factors if other[0] == key[0]})
    if len({run.source for run in telling}) < 2:
        return 0.5, 2.0
    sizes = Counter(run.source for run in telling)
    ratios = sorted(
        (run.ratio / factors[run.counter, run.name], 1 / math.sqrt(sizes[run.source])) for run in telling
    )
    lower, upper = (_weighted_quantile(ratios, share) for share in (OUTSIDE, 1 - OUTSIDE))
    return min(round(lower, 2), 1.0), max(round(upper, 2), 1.0)


def _weighted_quantile(ordered: list[tuple[float, float]], share: float) -> float:
    """Return the first of ordered (value, weight) up to which ``share`` of the weight lies."""
    limit, passed = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= limit:
            return value
    return ordered[-1][0]


def _by_source(runs: Iterable[MeasuredRun]) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {}
    for run in runs:
        ratios.setdefault(run.source, []).append(run.ratio)
    return ratios


def _runs_of_class(runs: list[MeasuredRun], key: tuple[str, str]) -> list[MeasuredRun]:
    """Return a class's runs of quality A, and those of quality B if A has fewer than ``FEW``."""
    of_class = _telling(runs, {key})
    best = [run for run in of_class if run.quality == "A"]
    return best if len(best) >= FEW else [run for run in of_class if run.quality in ("A", "B")]


def _telling(runs: list[MeasuredRun], keys: set[tuple[str, str]]) -> list[MeasuredRun]:
    """Return the runs of these classes whose ratio isn't dominated by errors in the states."""
    return [
        run
        for run in runs
        if (run.counter, run.name) in keys
        and run.quality in ("A", "B")
        and run.dynamic >= TELLING * run.measured
    ]


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
        predictions.append(
            Prediction(
                run,
                likely=run.fixed + dynamic,
                lower=run.fixed + dynamic * residual.lower,
                upper=run.fixed + dynamic * residual.upper,
            )
        )
    return predictions


def held_out(runs: list[MeasuredRun], previous: list[Residual]) -> list[Prediction]:
    """Predict each source's runs with a fit to all other sources."""
    predictions = []
    for source in sorted({run.source for run in runs}):
        other_runs = fit([run for run in runs if run.source != source], previous)
        predictions += predict([run for run in runs if run.source == source], other_runs)
    return predictions


def score(predictions: list[Prediction]) -> dict[str, float]:
    """Compute the figures of ``compare``, as fractions.

    ``sources_covered``: the mean over sources of the share of their runs that the range holds.
    """
    errors = [prediction.error for prediction in predictions]
    size = sorted(abs(error) for error in errors)
    covered: dict[str, list[bool]] = {}
    for prediction in predictions:
        covered.setdefault(prediction.run.source, []).append(prediction.covered)
    flags = [flag for of_source in covered.values() for flag in of_source]
    return {
        "rows": len(errors),
        "median_abs_error": round(statistics.median(size), 4),
        "p95_abs_error": round(_quantile(size, 0.95), 4),
        "bias": round(statistics.median(errors), 4),
        "under_by_3pct": round(sum(error < -0.03 for error in errors) / len(errors), 4),
        "covered": round(sum(flags) / len(flags), 4),
        "sources_covered": round(statistics.mean(sum(f) / len(f) for f in covered.values()), 4),
    }
