"""A table scored as new publications would be: each source with the ranges that all others leave."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published import fit, rows
from benchmarks.published.scoring import Comparison, compare_rows
from estimator.memory import residuals


def compare_held_out(path: str | Path) -> Comparison:
    """Score the table at ``path``, each source with the ranges that all others leave.

    What is left out is the fit of factors and ranges (:mod:`benchmarks.published.fit`) to the table's own
    rows; the formulas and the speeds' efficiencies stay.
    """
    table = rows.read(path)
    runs, previous = fit.runs_of(Path(path)), list(residuals.table().values())
    parts = []
    for source in dict.fromkeys(row.source for row in table):
        others = [run for run in runs if run.source != source]
        with residuals.using(fit.fit(others, previous)):
            parts.append(compare_rows(row for row in table if row.source == source))
    return Comparison(
        rows=tuple(row for part in parts for row in part.rows),
        judged=tuple(item for part in parts for item in part.judged),
        memory=tuple(item for part in parts for item in part.memory),
        throughput=tuple(item for part in parts for item in part.throughput),
        verdict_skipped={key: text for part in parts for key, text in part.verdict_skipped.items()},
        memory_skipped={key: text for part in parts for key, text in part.memory_skipped.items()},
        throughput_skipped={key: text for part in parts for key, text in part.throughput_skipped.items()},
    )
