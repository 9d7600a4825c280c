"""Refit the memory ranges and score them: ``python -m benchmarks.published.refit``.

Writes ``estimator/data/residuals.csv`` and ``benchmarks/results/estimator_fit.*``. Each score is given
twice: on the rows that were fitted, and with each source left out of the fit in turn, so that no row of a
publication helps to predict another row of the same publication.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.published import fit, rows
from benchmarks.published.held_out import judge_held_out, replaced_residuals
from benchmarks.published.rows import PublishedRow
from benchmarks.published.verdict import Judged, by_headroom, calibration, judge, verdict
from estimator.memory.residuals import TABLE, Residual, table

Scores = dict[str, dict[str, float]]  # by group of rows

RESULTS = Path(__file__).parents[1] / "results"
MOST_FITS = 10
FIGURES = ("median_abs_error", "p95_abs_error", "bias", "under_by_3pct", "covered", "sources_covered")


def main() -> None:
    """Refit ``estimator/data/residuals.csv``, write the scores to ``benchmarks/results`` and print them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    published = rows.read(rows.TABLE)
    residuals = settled(published, list(table().values()))
    _write(residuals.values())
    with replaced_residuals(residuals):
        _report(published, residuals)


def settled(published: list[PublishedRow], previous: list[Residual]) -> dict[tuple[str, str], Residual]:
    """Refit until nothing changes, as the moment of a run's peak depends on the factors.

    Raises RuntimeError if that takes more than :data:`MOST_FITS` fits.
    """
    for _ in range(MOST_FITS):
        with replaced_residuals({(row.counter, row.name): row for row in previous}):
            residuals = fit.fit(fit.runs_of(published), previous)
        if list(residuals.values()) == previous:
            return residuals
        previous = list(residuals.values())
    raise RuntimeError(f"the factors still change after {MOST_FITS} fits")


def _report(published: list[PublishedRow], residuals: dict[tuple[str, str], Residual]) -> None:
    """Write the scores of these ranges, which the estimator uses, and print them."""
    previous, runs = list(residuals.values()), fit.runs_of(published)
    scored = {run.id for run in runs if run.quality == "A"}
    inside = [prediction for prediction in fit.predict(runs, residuals) if prediction.run.id in scored]
    outside = [prediction for prediction in fit.held_out(runs, previous) if prediction.run.id in scored]
    scores, held_scores, worst = _scores(inside), _scores(outside), _worst(inside)
    judged = judge_held_out(published)
    in_sample = [item for item in map(judge, published) if isinstance(item, Judged)]
    verdicts = {
        "in_sample": asdict(verdict(in_sample)),
        "held_out_by_source": asdict(verdict(judged)),
    }
    all_scores = fit.score(fit.held_out(runs, previous))
    report = {
        "verdict": verdicts,
        "risk": calibration(judged),
        "headroom": by_headroom(judged),
        "every_row_held_out": all_scores,
        "quality": "A",
        "lean": fit.LEAN,
        "in_sample": scores,
        "held_out_by_source": held_scores,
        "worst": worst,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "estimator_fit.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    text = _markdown(verdicts, scores, held_scores, worst)
    (RESULTS / "estimator_fit.md").write_text(text, encoding="utf-8")
    print(text)


def _scores(predictions: list[fit.Prediction]) -> Scores:
    groups: dict[str, list[fit.Prediction]] = {"all": predictions}
    for prediction in predictions:
        groups.setdefault(f"class: {prediction.run.counter}, {prediction.run.name}", []).append(prediction)
        groups.setdefault(f"method: {prediction.run.method}", []).append(prediction)
        groups.setdefault(f"source: {prediction.run.source}", []).append(prediction)
    return {name: fit.score(group) for name, group in groups.items()}


def _worst(predictions: list[fit.Prediction]) -> list[dict[str, Any]]:
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


def _markdown(
    verdicts: dict[str, dict[str, int]], inside: Scores, outside: Scores, worst: list[dict[str, Any]]
) -> str:
    lines = [
        "# How far the memory formulas are off",
        "",
        "Rows of quality A of `benchmarks/published/data/measured.csv`, by "
        "`python -m benchmarks.published.refit`.",
        "",
        _verdict_line("Ranges fitted to all sources", verdicts["in_sample"]),
        _verdict_line("Each source with the ranges of the others", verdicts["held_out_by_source"]),
        "",
        "Each cell: on the rows that the numbers are fitted to / with the row's whole source left out.",
        "",
        "| group | rows | median error | 95 % below | signed | under by 3 % | range holds | sources |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, fitted in inside.items():
        held_out_scores = outside[name]
        cells = [f"{fitted[key]:.1%} / {held_out_scores[key]:.1%}" for key in FIGURES]
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


def _verdict_line(label: str, counts: dict[str, int]) -> str:
    return (
        f"{label}: of {counts['ran']} runs that ran {counts['refused_of_ran']} are refused; of "
        f"{counts['oom']} that ran out of memory {counts['accepted_of_oom']} are accepted."
    )


def _write(residuals: Iterable[Residual]) -> None:
    names = [field.name for field in fields(Residual)]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["class" if name == "name" else name for name in names])
        for row in residuals:
            values = [getattr(row, name) for name in names]
            writer.writerow(values)


if __name__ == "__main__":
    main()
