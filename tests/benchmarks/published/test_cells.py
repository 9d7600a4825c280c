"""The file of a table: what is refused, by file, line and column."""

from pathlib import Path

import pytest

from benchmarks.published import rows
from estimator.errors import UserError
from tests.benchmarks.published.measured_tables import table


def problem(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        rows.read(path)
    assert "\n" not in caught.value.problem
    assert caught.value.advice
    return caught.value.problem


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "missing.csv cannot be read" in problem(tmp_path / "missing.csv")


def test_a_folder_is_not_a_table(tmp_path: Path) -> None:
    assert "cannot be read" in problem(tmp_path)


def test_a_file_that_is_not_text_is_not_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\x89PNG\x00\xff\xfe")
    assert "is not a CSV file" in problem(path)


@pytest.mark.parametrize("content", ["", "\n", "a,b\n1,2\n"])
def test_columns_that_lack_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    assert problem(path).startswith("table.csv has no column id, source, model")


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    assert "has no row below its header" in problem(table(tmp_path))


def test_text_where_a_measured_number_is_due_is_named_by_its_cell(tmp_path: Path) -> None:
    path = table(tmp_path, {}, {"peak_mem_GiB": "forty"})
    assert problem(path) == "table.csv, line 3: peak_mem_GiB = 'forty' is not a number of at least 0."


def test_a_negative_measurement_is_refused(tmp_path: Path) -> None:
    assert "tps_per_gpu = '-5' is not a number" in problem(table(tmp_path, {"tps_per_gpu": "-5"}))


def test_a_line_with_too_many_cells_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, {})
    path.write_text(path.read_text() + "x,y\n")
    assert "line 3: it has not as many cells as the header" in problem(path)


def test_text_in_a_degree_leaves_out_its_row_alone(tmp_path: Path) -> None:
    first, second = rows.read(table(tmp_path, {"id": "x1", "tp": "two"}, {"id": "x2"}))
    assert first.memory_skip == "tp = 'two' is not a number"
    assert second.memory_skip is None
