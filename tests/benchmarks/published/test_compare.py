"""``python -m benchmarks.published.compare``: scores as tables, JSON and CSV."""

import csv
import io
import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.published.compare import app, main
from benchmarks.published.scoring import Score
from estimator.errors import UserError
from tests.benchmarks.published.measured_tables import CARRIED, carried


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_output_has_every_metric_for_all_rows_per_group_and_per_row() -> None:
    comparison = json.loads(run(str(CARRIED), "--json", "--rows"))
    assert comparison["rows"] == len(carried().rows)
    assert comparison["rows_scored"] + len(comparison["rows_skipped"]) == comparison["rows"]
    figures = {field.name for field in fields(Score)}
    assert {"ran", "refused_of_ran", "oom", "accepted_of_oom"} <= set(comparison["verdict"])
    wrong = comparison["verdict"]["refused_of_ran"] + comparison["verdict"]["accepted_of_oom"]
    assert len(comparison["verdict"]["wrong"]) == wrong
    for metric in ("memory", "throughput"):
        assert set(comparison[metric]["all"]) == figures
        for by in ("source", "framework", "method", "quality"):
            groups = comparison[metric][by]
            assert all(set(group) == figures for group in groups.values())
            assert sum(group["rows"] for group in groups.values()) == comparison[metric]["all"]["rows"]
    assert (
        len(comparison["each_row"])
        == comparison["memory"]["all"]["rows"] + comparison["throughput"]["all"]["rows"]
    )


def test_csv_has_a_line_for_each_prediction() -> None:
    lines = list(csv.DictReader(io.StringIO(run(str(CARRIED), "--csv"))))
    assert len(lines) == len(carried().memory) + len(carried().throughput)
    assert float(lines[0]["predicted"]) > 0


def test_the_table_names_the_rows_with_the_largest_errors() -> None:
    text = run(str(CARRIED), "--by", "framework")
    worst = max(carried().memory, key=lambda item: abs(item.error))
    assert worst.row.id in text
    assert "percentile" in text


def test_an_unknown_grouping_is_named() -> None:
    with pytest.raises(UserError, match="--by model is not known"):
        run(str(CARRIED), "--by", "model")


def test_a_user_error_is_two_lines_with_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compare", "missing.csv"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    problem, advice = capsys.readouterr().err.splitlines()
    assert "missing.csv cannot be read" in problem
    assert advice


def test_a_row_that_cannot_be_scored_is_listed_with_its_reason(tmp_path: Path) -> None:
    with CARRIED.open(newline="", encoding="utf-8") as file:
        line = next(csv.DictReader(file))
    path = tmp_path / "one.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerow({**line, "id": "x9", "method": "ia3"})
    comparison = json.loads(run(str(path), "--json"))
    assert comparison["rows_scored"] == 0
    assert comparison["rows_skipped"] == {"x9": "method 'ia3' is not supported"}
    assert comparison["memory"]["all"]["median_abs_error"] is None
