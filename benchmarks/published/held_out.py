"""Held-out scores: each source of a table, with ranges fitted to all other sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks.published import fit, rows
from benchmarks.published.scoring import Comparison, compare_rows
from estimator.memory import residuals
from estimator.memory.residuals import Residual


@contextmanager
def replaced_residuals(rows: Mapping[tuple[str, str], Residual]) -> Iterator[None]:
    """Estimate memory with ``rows`` by (counter, class) in place of the estimator's table."""
    with mock.patch.object(residuals, "table", return_value=rows):
        yield


def compare_held_out(path: str | Path) -> Comparison:
    """Score the table at ``path``, each source with ranges fitted to all other sources.

    Only the factors and ranges of ``fit.py`` are fitted again; the formulas and the efficiencies of the speed
    model stay.
    """
    table = rows.read(path)
    runs, previous = fit.runs_of(Path(path)), list(residuals.table().values())
    parts = []
    for source in dict.fromkeys(row.source for row in table):
        other_runs = [run for run in runs if run.source != source]
        with replaced_residuals(fit.fit(other_runs, previous)):
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
