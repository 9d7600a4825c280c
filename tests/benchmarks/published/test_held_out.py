"""Scores of a table with each source left out of the fit."""

from benchmarks.published import rows, scoring
from benchmarks.published.held_out import compare_held_out, replaced_residuals
from benchmarks.published.verdict import verdict
from estimator.memory import residuals

CARRIED = rows.TABLE


def test_runs_of_new_sources_are_judged_as_well_as_those_of_the_fit() -> None:
    held_out = compare_held_out(CARRIED)
    inside = scoring.compare(CARRIED)
    assert {row.id for row in held_out.rows} == {row.id for row in inside.rows}
    answer = verdict(held_out.judged)
    assert answer.refused_of_ran <= 0.05 * answer.ran
    assert answer.accepted_of_oom <= 0.05 * answer.oom
    assert [item.upper for item in held_out.memory] != [item.upper for item in inside.memory]


def test_the_tables_own_ranges_are_back_afterwards() -> None:
    row = next(iter(residuals.table().values()))
    with replaced_residuals({(row.counter, row.name): row}):
        pass
    assert scoring.compare(CARRIED).memory == scoring.compare(CARRIED).memory
