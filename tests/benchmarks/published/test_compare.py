"""The estimator against the published measurements that the project carries, and how it is scored."""

import csv
import io
import json
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.published import compare, rows
from benchmarks.published.compare import (
    Comparison,
    Score,
    Scored,
    percentile,
    score,
    usual_network,
)
from benchmarks.published.verdict import verdict
from estimator import hardware
from estimator.cli.compare import compare as command
from estimator.errors import UserError

CARRIED = rows.TABLE


@lru_cache(maxsize=1)
def carried() -> Comparison:
    return compare.compare(CARRIED)


def precise(items: tuple[Scored, ...]) -> Score:
    """The score on rows of quality A."""
    return score(item for item in items if item.row.quality == "A")


# ---------------------------------------------------------------------------------------------------------
# The limits


def test_every_carried_row_is_scored() -> None:
    assert carried().skipped == {}


def fixed(kinds: tuple[str, ...]) -> Score:
    """The score on rows of quality A whose batches have one length."""
    rows_of = (item for item in carried().memory if item.row.quality == "A" and not item.row.varies)
    return score(item for item in rows_of if item.row.kind in kinds)


def test_litgpts_llama_adapters_are_off_by_less_than_3_percent() -> None:
    """tutorials/resource-tables.md: v1 and v2, on bf16 weights, NF4, and NF4 with its scales quantised."""
    adapters = [item for item in carried().memory if item.row.setup and item.row.setup.prompts]
    assert len(adapters) == 12
    assert all(abs(item.error) < 0.03 for item in adapters), [(item.row.id, item.error) for item in adapters]


def test_of_100_runs_that_ran_at_most_3_are_refused_and_none_that_ran_out_of_memory_is_accepted() -> None:
    answer = verdict(carried().judged)
    assert answer.ran > 600
    assert answer.refused_of_ran <= 0.03 * answer.ran
    assert answer.oom >= 16
    assert answer.accepted_of_oom == 0


def test_live_memory_of_precise_rows_is_off_by_at_most_2_percent_in_the_median() -> None:
    found = fixed(("allocated", "active"))
    assert found.median_abs_error is not None
    assert found.p95_abs_error is not None
    assert found.median_abs_error <= 0.02
    assert found.p95_abs_error <= 0.085  # 8 % is the goal; the next row after the 95 % is a phi-1.5


def test_reserved_memory_of_precise_rows_is_off_by_at_most_5_percent_in_the_median() -> None:
    found = fixed(("reserved",))
    assert found.median_abs_error is not None
    assert found.p95_abs_error is not None
    assert found.median_abs_error <= 0.05
    assert found.p95_abs_error <= 0.17  # 15 % is the goal: benchmarks/results/estimator_fit.md names the rows


def test_the_upper_end_covers_19_of_20_precise_rows() -> None:
    found = precise(carried().memory)
    assert found.upper_covers is not None
    assert found.upper_covers >= 0.95


def test_the_median_throughput_error_on_precise_rows_is_at_most_15_percent() -> None:
    found = precise(carried().throughput).median_abs_error
    assert found is not None
    assert found <= 0.15


# ---------------------------------------------------------------------------------------------------------
# How it is scored


def scored(measured: float, predicted: float, upper: float | None = None) -> Scored:
    row = rows.read(CARRIED)[0]
    return Scored(row=row, measured=measured, predicted=predicted, upper=upper, basis="made up")


def test_errors_are_fractions_of_the_measurement() -> None:
    found = score([scored(100, 90, 95), scored(100, 98, 101), scored(50, 55, 60)])
    assert found.rows == 3
    assert found.median_abs_error == pytest.approx(0.1)
    assert found.bias == pytest.approx(-0.02)
    assert found.under_by_3pct == pytest.approx(1 / 3)
    assert found.upper_covers == pytest.approx(2 / 3)


def test_a_group_without_a_bound_covers_nothing_known() -> None:
    assert score([scored(100, 90)]).upper_covers is None
    assert score([]).median_abs_error is None


def test_a_percentile_lies_between_its_neighbours() -> None:
    values = [float(number) for number in range(21)]
    assert percentile(values, 0.95) == pytest.approx(19)
    assert percentile([1.0, 2.0], 0.5) == pytest.approx(1.5)
    assert percentile([3.0], 0.95) == 3.0


def test_the_usual_network_is_that_of_the_largest_machine_with_the_gpu() -> None:
    machines = [item for item in hardware.instances() if item.gpu == "H100 SXM" and item.gpu_count == 8]
    gbps, rdma = usual_network(hardware.gpu("H100 SXM"), 8)
    assert gbps == max(item.network_gbps or 0 for item in machines)
    assert rdma


def test_a_rack_of_72_gpus_has_the_network_of_72() -> None:
    inside, _ = usual_network(hardware.gpu("GB200"), 72)
    server, _ = usual_network(hardware.gpu("GB200"), 8)
    assert inside is not None
    assert server is not None
    assert inside == pytest.approx(9 * server)


# ---------------------------------------------------------------------------------------------------------
# The command


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_has_every_figure_over_all_rows_and_per_group() -> None:
    found = json.loads(run(str(CARRIED), "--json"))
    assert found["rows"] == len(carried().rows)
    assert found["rows_scored"] + len(found["rows_skipped"]) == found["rows"]
    figures = {field.name for field in fields(Score)}
    assert {"ran", "refused_of_ran", "oom", "accepted_of_oom"} <= set(found["verdict"])
    assert len(found["verdict"]["wrong"]) == found["verdict"]["refused_of_ran"]
    for what in ("memory", "throughput"):
        assert set(found[what]["all"]) == figures
        for by in ("source", "framework", "method", "quality"):
            groups = found[what][by]
            assert all(set(group) == figures for group in groups.values())
            assert sum(group["rows"] for group in groups.values()) == found[what]["all"]["rows"]
    assert "each_row" not in found


def test_json_has_each_rows_prediction_when_asked() -> None:
    found = json.loads(run(str(CARRIED), "--json", "--rows"))
    lines = found["each_row"]
    assert len(lines) == found["memory"]["all"]["rows"] + found["throughput"]["all"]["rows"]
    assert all(line["predicted"] > 0 for line in lines)


def test_csv_has_a_line_for_each_prediction() -> None:
    lines = list(csv.DictReader(io.StringIO(run(str(CARRIED), "--csv"))))
    assert len(lines) == len(carried().memory) + len(carried().throughput)
    assert float(lines[0]["predicted"]) > 0


def test_the_table_names_the_rows_that_are_furthest_off() -> None:
    text = run(str(CARRIED), "--by", "framework")
    worst = max(carried().memory, key=lambda item: abs(item.error))
    assert worst.row.id in text
    assert "percentile" in text


def test_an_unknown_grouping_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--by model is not known"):
        run(str(CARRIED), "--by", "model")


def test_a_row_that_cannot_be_scored_is_listed_with_its_reason(tmp_path: Path) -> None:
    with CARRIED.open(newline="", encoding="utf-8") as file:
        line = next(csv.DictReader(file))
    path = tmp_path / "one.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerow({**line, "id": "x9", "method": "ia3"})
    found = json.loads(run(str(path), "--json"))
    assert found["rows_scored"] == 0
    assert found["rows_skipped"] == {"x9": "method 'ia3' is not claimed"}
    assert found["memory"]["all"]["median_abs_error"] is None
