"""Fit of ``estimator/data/residuals.csv`` to published measurements, written by ``refit.py``.

Three numbers for each class of runs, no more: a factor on what the formulas count beyond the states, and the
ends of the range over that.
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

# The likely value is what this share of a class's sources stay below: a run that needs more than predicted
# costs more than one that needs less.
LEAN = 0.6
COVERED = 0.95  # of new sources, by each end of the range
# A source's score is what this share of its runs stay below (for the lower end: above)
WITHIN_A_SOURCE = 0.95
GIVEN = ("cpu", "DeepSpeed", VARYING)  # rows that too few scored runs fit; written by hand
FEW = 5  # runs of quality A; a class with fewer takes those of quality B as well
# Of a measurement, what must not be of the states for its ratio to tell something: a per cent of 16 GiB of
# states is a tenth of 1.6 GiB of all else
TELLING = 0.15
FEW_SOURCES = 8  # below that their spread says nothing, and that of all classes counts


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One published measurement of memory and the formulas' sums for it, in GiB."""

    id: str
    source: str
    engine: str
    method: str
    quality: str
    counter: str
    name: str  # of the class
    measured: float
    fixed: float  # what is kept from step to step, and what the allocator reserves beside what is alive
    dynamic: float  # all else

    @property
    def ratio(self) -> float:
        """Measured over formulas, of what varies; at least 0.05, where the fixed part is overestimated."""
        return max((self.measured - self.fixed) / self.dynamic, 0.05)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a fit says of one run, in GiB."""

    run: MeasuredRun
    likely: float
    upper: float

    @property
    def error(self) -> float:
        """Likely over measured, minus 1."""
        return self.likely / self.run.measured - 1


def runs_of(path: Path = rows.TABLE) -> list[MeasuredRun]:
    """The runs of a table of measurements whose memory can be scored."""
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
    """Factor and range of each class of runs, by (counter, class).

    ``previous`` are the rows of the table so far: they say which classes there are, and those of ``GIVEN``
    stay. Ten runs of one publication are siblings, so each source has one vote: factors are of the sources'
    medians, ranges of the sources' scores. A class of fewer than two sources takes the factor of its
    counter's other classes, one of fewer than ``FEW_SOURCES`` their spread; an engine that none of the
    class's runs used takes the widest range of all.
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
    """The factor of a class, at least 1.

    A class whose runs come from one source alone takes the factor of all classes: a source's own habits would
    pass for the class's.
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
    """Lower and upper end of a class's range over its likely value.

    From the sources' scores, as logarithms, the farthest on each side drawn in to the next: their mean, and
    Student's interval for the next source's score.
    With fewer than ``FEW_SOURCES`` of them, the mean and spread of all sources of the counter.
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
    """The scores with the farthest on each side drawn in to the next one, where there are four or more."""
    ordered = sorted(scores)
    if len(ordered) < 4:
        return ordered
    return [ordered[1], *ordered[1:-1], ordered[-2]]


def _scores_of(
    runs: list[MeasuredRun], keys: set[tuple[str, str]], factors: dict[tuple[str, str], float]
) -> list[tuple[float, float]]:
    """Low and high score of each source in these classes, as logarithms of measured over likely."""
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
    """The quantile of Student's t: Cornish and Fisher's expansion in 1 / degrees of freedom (1938).

    Within 1 % of the exact value from 4 degrees of freedom on, 4 % below it for 2.
    """
    z = statistics.NormalDist().inv_cdf(share)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + (z**3 + z) / 4 / freedom + second / freedom**2


def _runs_of_class(runs: list[MeasuredRun], key: tuple[str, str]) -> list[MeasuredRun]:
    """A class's runs of quality A; where they are fewer than ``FEW``, those of quality B as well."""
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
    """The value below which that share of the ordered values lies, linear between the two nearest."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def predict(runs: Iterable[MeasuredRun], residuals: dict[tuple[str, str], Residual]) -> list[Prediction]:
    """Each run's memory by the formulas and the fitted residual of its counter and class."""
    predictions = []
    for run in runs:
        residual = residuals[run.counter, run.name]
        dynamic = run.dynamic * residual.factor
        upper = run.fixed + dynamic * residual.upper_for(run.engine)
        predictions.append(Prediction(run, run.fixed + dynamic, upper))
    return predictions


def held_out(runs: list[MeasuredRun], previous: list[Residual]) -> list[Prediction]:
    """Each source's runs as a fit to all other sources predicts them."""
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
