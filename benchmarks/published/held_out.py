"""Held-out scores: each source of a table, with ranges fitted to all other sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks.published import fit, rows
from benchmarks.published.rows import PublishedRow
from benchmarks.published.scoring import Comparison, compare_rows
from benchmarks.published.verdict import Judged, judge
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
    parts = [compare_rows(of_source) for of_source in _sources_held_out(rows.read(path))]
    return Comparison(
        rows=tuple(row for part in parts for row in part.rows),
        judged=tuple(item for part in parts for item in part.judged),
        memory=tuple(item for part in parts for item in part.memory),
        throughput=tuple(item for part in parts for item in part.throughput),
        verdict_skipped={key: text for part in parts for key, text in part.verdict_skipped.items()},
        memory_skipped={key: text for part in parts for key, text in part.memory_skipped.items()},
        throughput_skipped={key: text for part in parts for key, text in part.throughput_skipped.items()},
    )


def judge_held_out(table: Sequence[PublishedRow]) -> list[Judged]:
    """Judge whether each run fits its GPU, each source with ranges fitted to all other sources."""
    judgments = (judge(row) for of_source in _sources_held_out(table) for row in of_source)
    return [item for item in judgments if isinstance(item, Judged)]


def _sources_held_out(table: Sequence[PublishedRow]) -> Iterator[list[PublishedRow]]:
    """Yield the rows of each source while memory is estimated by ranges without that source."""
    runs, previous = fit.runs_of(table), list(residuals.table().values())
    for source in dict.fromkeys(row.source for row in table):
        other_runs = [run for run in runs if run.source != source]
        with replaced_residuals(fit.fit(other_runs, previous)):
            yield [row for row in table if row.source == source]
