"""Comparison of several runs."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from decorators.card.runs import RunRecord, curves, differing_settings, figures, short_names
from launchers.evaluation.held_out import Score
from launchers.evaluation.result import EvaluationResult
from launchers.settings import Settings, flat
from tests.decorators.profile.states import make_state
from tests.launchers.report.test_trackers import metrics


def _record(run: str = "11", *, steps: int = 60, lr: float = 1e-4, **changes: object) -> RunRecord:
    state = make_state()
    assert state.plan is not None
    settings = Settings.model_validate({"optimizer": {"lr": lr}, "output_dir": run})
    record = RunRecord(
        run=run,
        started=datetime(2026, 11, 24, 9, 30),
        state="finished",
        plan=state.plan,
        settings=flat(settings),
        metrics=tuple(dataclasses.replace(metrics(step), loss=2.0 / step) for step in range(1, steps + 1)),
        measured=state.measured,
        evaluation=EvaluationResult(
            base=Score(loss=2.0, labels=50, rows=7), finetuned=Score(loss=1.0, labels=50, rows=7)
        ),
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def test_the_table_pairs_predicted_and_measured_with_dashes_for_missing_values() -> None:
    started = _record("12", metrics=(), measured=None, evaluation=None, state="running or killed")
    rows = dict(figures([_record(), started]))
    assert rows["started"][0] == "2026-11-24 09:30"
    assert rows["state"] == ("finished", "running or killed")
    assert rows["steps"] == ("60", "-")
    assert rows["loss, first -> last"] == ("2.0000 -> 0.0333", "-")
    assert rows["held-out loss, before -> after"] == ("2.0000 -> 1.0000", "-")
    assert rows["memory, predicted -> measured"] == ("34.0 GiB -> 32.5 GiB", "34.0 GiB -> ?")
    assert rows["time, predicted -> measured"] == ("1:30:00 -> 4:20", "1:30:00 -> ?")
    assert rows["USD, predicted -> measured"] == ("61.45 -> 2.96", "61.45 -> ?")


def test_short_names_are_the_shortest_endings_that_differ() -> None:
    assert short_names(["1795824539817418"]) == ["7418"]
    assert short_names(["1795824539817418", "1795824539917418"]) == ["817418", "917418"]
    assert short_names(["11", "12"]) == ["11", "12"]


def test_only_differing_settings_are_rows_and_folders_are_ignored() -> None:
    rows = differing_settings([_record("11"), _record("12", lr=3e-4)])
    assert rows == [("optimizer.lr", ("0.0001", "0.0003"))]
    assert differing_settings([_record("11"), _record("12")]) == []


def test_curves_of_runs_share_a_chart_and_are_thinned() -> None:
    spec = curves([_record("11", steps=5000), _record("12")], "loss", "loss")
    values = spec["data"]["values"]
    assert {value["run"] for value in values} == {"11", "12"}
    assert len(values) == 200 + 60
    assert max(value["step"] for value in values) == 5000
