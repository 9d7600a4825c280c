"""Fits ``data/residuals.csv`` to published measurements: ``python -m estimator.published.fit``.

Two numbers for each class of runs, no more: a factor on the formulas' sum and the upper bound over that.
Scores are printed and written twice: on the rows that the numbers come from, and with each source left out
of the fit in turn, so that no row of a publication helps to predict another of it.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.memory.moments import peak
from estimator.memory.residuals import LIVE, TABLE, Residual, class_of, table
from estimator.plan import GIB
from estimator.published import rows

Scores = dict[str, dict[str, float]]  # by group of rows

MEASURED = TABLE.with_name("measured.csv")
RESULTS = TABLE.parent.parent.parent / "benchmarks" / "results"

# The likely value is what this share of a class's runs stay below: a run that needs more than predicted costs
# more than one that needs less.
LEAN = 0.8
COVERED = 0.95  # of runs, by the upper bound
GIVEN = ("cpu", "DeepSpeed")  # rows that no scored run fits; written by hand
FEW = 5  # runs of quality A; a class with fewer takes those of quality B as well


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One published measurement of memory and the formulas' sum for it, both in GiB."""

    id: str
    source: str
    engine: str
    method: str
    quality: str
    counter: str
    name: str  # of the class
    measured: float
    formulas: float

    @property
    def ratio(self) -> float:
        """Measured over formulas."""
        return self.measured / self.formulas


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


def runs_of(path: Path = MEASURED) -> list[MeasuredRun]:
    """The runs of a table of measurements whose memory can be scored."""
    runs = []
    for row in rows.read(path):
        if row.memory_skip or row.setup is None or row.gib is None or row.kind in (None, "process"):
            continue
        largest = peak(row.setup)
        counter = "live" if row.kind in LIVE else "held"
        formulas = largest.active + (largest.beside if counter == "held" else 0)
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
                formulas=formulas / GIB,
            )
        )
    return runs


def fit(runs: Iterable[MeasuredRun], previous: Iterable[Residual]) -> dict[tuple[str, str], Residual]:
    """Factor and upper bound of each class of runs, by (counter, class).

    ``previous`` are the rows of the table so far: they say which classes there are, and those of ``GIVEN``
    stay. A class without runs takes what all runs of its counter say. The bound has what sources differ by
    once; twice where one source alone speaks for the class, and for engines that none of its runs used.
    """
    all_runs, rows = list(runs), list(previous)
    width = _width(all_runs, rows)
    result = {}
    for row in rows:
        key = (row.counter, row.name)
        if row.name in GIVEN:
            result[key] = row
            continue
        class_runs, factor = _runs_of_class(all_runs, key), _factor(all_runs, key)
        ratios = [run.ratio / factor for run in class_runs]
        sources = len({run.source for run in class_runs})
        upper = max(width if sources > 1 else width**2, _covering(ratios))
        result[key] = Residual(
            counter=row.counter,
            name=row.name,
            factor=factor,
            upper=round(upper, 2),
            elsewhere=round(max(upper, width**2), 2),
            runs=len(class_runs),
            sources=sources,
            engines=tuple(sorted({run.engine for run in class_runs})),
            basis=_basis(class_runs, all_runs),
        )
    return result


def _width(runs: list[MeasuredRun], previous: list[Residual]) -> float:
    """The upper bound over the likely value that all classes have at least.

    Sources differ more than classes do, and the next run is of another source. So: of every run of quality
    A, its measurement over what the other sources' runs predict for it; the value that covers the next such
    ratio with a chance of ``COVERED``.
    """
    names = {(row.counter, row.name) for row in previous if row.name not in GIVEN}
    ratios = []
    for source in {run.source for run in runs}:
        others = [run for run in runs if run.source != source]
        factors = {key: _factor(others, key) for key in names}
        ratios += [
            run.ratio / factors[run.counter, run.name]
            for run in runs
            if run.source == source and run.quality == "A" and (run.counter, run.name) in factors
        ]
    return _covering(ratios)


def _covering(ratios: list[float]) -> float:
    """The ratio that covers the next one with a chance of ``COVERED``; 1 where there is none.

    The k-th smallest of n covers the next with a chance of k / (n + 1), if runs are alike.
    """
    ordered = sorted(ratios)
    place = math.ceil(COVERED * (len(ordered) + 1))
    return ordered[min(place, len(ordered)) - 1] if ordered else 1.0


def _factor(runs: list[MeasuredRun], key: tuple[str, str]) -> float:
    """The factor of a class, at least 1.

    A class whose runs come from one source alone takes the factor of all classes: a source's own habits would
    pass for the class's.
    """
    class_runs = _runs_of_class(runs, key)
    if len({run.source for run in class_runs}) < 2:
        class_runs = [run for run in runs if run.counter == key[0] and run.quality == "A"]
    if not class_runs:
        return 1.0
    return max(round(_quantile(sorted(run.ratio for run in class_runs), LEAN), 2), 1.0)


def _runs_of_class(runs: list[MeasuredRun], key: tuple[str, str]) -> list[MeasuredRun]:
    """A class's runs of quality A; where they are fewer than ``FEW``, those of quality B as well."""
    of_class = [run for run in runs if (run.counter, run.name) == key]
    best = [run for run in of_class if run.quality == "A"]
    return best if len(best) >= FEW else [run for run in of_class if run.quality in ("A", "B")]


def _basis(class_runs: list[MeasuredRun], runs: list[MeasuredRun]) -> str:
    if not class_runs:
        return f"no published run of this kind; {len(runs)} of other kinds"
    sources = len({run.source for run in class_runs})
    return f"{len(class_runs)} published runs of {sources} source" + ("s" if sources > 1 else "")


def _quantile(ordered: list[float], share: float) -> float:
    """The value below which that share of the ordered values lies, linear between the two nearest."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def predict(runs: Iterable[MeasuredRun], residuals: dict[tuple[str, str], Residual]) -> list[Prediction]:
    """Each run's memory by the formulas times the fitted residual of its counter and class."""
    predictions = []
    for run in runs:
        residual = residuals[run.counter, run.name]
        likely = run.formulas * residual.factor
        predictions.append(Prediction(run, likely, likely * residual.upper_for(run.engine)))
    return predictions


def held_out(runs: list[MeasuredRun], previous: list[Residual]) -> list[Prediction]:
    """Each source's runs as a fit to all other sources predicts them."""
    predictions = []
    for source in sorted({run.source for run in runs}):
        others = fit([run for run in runs if run.source != source], previous)
        predictions += predict([run for run in runs if run.source == source], others)
    return predictions


def score(predictions: list[Prediction]) -> dict[str, float]:
    """The figures that ``finetune compare`` prints, as fractions."""
    errors = [prediction.error for prediction in predictions]
    size = sorted(abs(error) for error in errors)
    return {
        "rows": len(errors),
        "median_abs_error": round(statistics.median(size), 4),
        "p95_abs_error": round(_quantile(size, 0.95), 4),
        "bias": round(statistics.median(errors), 4),
        "under_by_3pct": round(sum(error < -0.03 for error in errors) / len(errors), 4),
        "upper_covers": round(
            sum(prediction.upper >= prediction.run.measured for prediction in predictions) / len(errors), 4
        ),
    }


def main() -> None:
    """Fit again; write ``data/residuals.csv`` and the scores in ``benchmarks/results``, and print them."""
    previous = list(table().values())
    runs = runs_of()
    residuals = fit(runs, previous)
    _write(residuals.values())
    scored = {run.id for run in runs if run.quality == "A"}
    inside = [prediction for prediction in predict(runs, residuals) if prediction.run.id in scored]
    outside = [prediction for prediction in held_out(runs, previous) if prediction.run.id in scored]
    scores, held_scores, worst = _scores(inside), _scores(outside), _worst(inside)
    report = {
        "quality": "A",
        "lean": LEAN,
        "in_sample": scores,
        "held_out_by_source": held_scores,
        "worst": worst,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "estimator_fit.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    text = _markdown(scores, held_scores, worst)
    (RESULTS / "estimator_fit.md").write_text(text, encoding="utf-8")
    print(text)


def _scores(predictions: list[Prediction]) -> Scores:
    groups: dict[str, list[Prediction]] = {"all": predictions}
    for prediction in predictions:
        groups.setdefault(f"class: {prediction.run.counter}, {prediction.run.name}", []).append(prediction)
        groups.setdefault(f"method: {prediction.run.method}", []).append(prediction)
        groups.setdefault(f"source: {prediction.run.source}", []).append(prediction)
    return {name: score(group) for name, group in groups.items()}


def _worst(predictions: list[Prediction]) -> list[dict[str, Any]]:
    ordered = sorted(predictions, key=lambda prediction: -abs(prediction.error))[:12]
    return [
        {
            "id": prediction.run.id,
            "source": prediction.run.source,
            "measured_gib": prediction.run.measured,
            "predicted_gib": round(prediction.likely, 2),
            "error": round(prediction.error, 3),
        }
        for prediction in ordered
    ]


def _markdown(inside: Scores, outside: Scores, worst: list[dict[str, Any]]) -> str:
    lines = [
        "# How far the memory formulas are off",
        "",
        "Rows of quality A of `estimator/data/measured.csv`; written by `python -m estimator.published.fit`.",
        "Each cell: on the rows that the numbers are fitted to / with the row's whole source left out.",
        "",
        "| group | rows | median error | 95 % below | median, signed | under by 3 % | upper covers |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, fitted in inside.items():
        held_out_scores = outside[name]
        cells = [
            f"{fitted[key]:.1%} / {held_out_scores[key]:.1%}"
            for key in ("median_abs_error", "p95_abs_error", "bias", "under_by_3pct", "upper_covers")
        ]
        lines.append(f"| {name} | {fitted['rows']} | " + " | ".join(cells) + " |")
    lines += ["", "The rows that are furthest off, in sample:", ""]
    lines += ["| row | source | measured, GiB | predicted | error |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in worst:
        lines.append(
            f"| {row['id']} | {row['source']} | {row['measured_gib']} | {row['predicted_gib']} | "
            f"{row['error']:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def _write(residuals: Iterable[Residual]) -> None:
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["counter", "class", "factor", "upper", "elsewhere", "runs", "sources", "engines", "basis"]
        )
        for row in residuals:
            numbers = [row.factor, row.upper, row.elsewhere, row.runs, row.sources]
            writer.writerow([row.counter, row.name, *numbers, " ".join(row.engines), row.basis])


if __name__ == "__main__":
    main()
