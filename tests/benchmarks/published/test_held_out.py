"""Scores of a table with each source left out of the fit."""

from benchmarks.published.held_out import replaced_residuals
from benchmarks.published.verdict import verdict
from estimator.memory import residuals
from tests.benchmarks.published.measured_tables import carried, carried_held_out


def test_runs_of_new_sources_are_judged_as_well_as_those_of_the_fit() -> None:
    held_out, inside = carried_held_out(), carried()
    assert {row.id for row in held_out.rows} == {row.id for row in inside.rows}
    counts = verdict(held_out.judged)
    assert counts.refused_of_ran <= 0.05 * counts.ran
    assert counts.accepted_of_oom <= 0.05 * counts.oom
    assert [item.upper for item in held_out.memory] != [item.upper for item in inside.memory]


def test_replaced_ranges_are_restored() -> None:
    before = residuals.table()
    key, row = next(iter(before.items()))
    with replaced_residuals({key: row}):
        assert residuals.table() == {key: row}
    assert residuals.table() == before
