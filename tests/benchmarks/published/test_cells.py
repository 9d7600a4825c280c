"""Parsing of a table file: errors name file, line and column."""

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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "table.csv cannot be read"),
        (b"\x89PNG\x00\xff\xfe", "is not a CSV file"),
        (b"", "table.csv has no column id, source, model"),
        (b"a,b\n1,2\n", "table.csv has no column id, source, model"),
    ],
)
def test_a_file_without_a_table_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_bytes(content)
    assert reason in problem(path)


def test_a_cell_without_its_number_and_a_table_without_rows_are_named(tmp_path: Path) -> None:
    assert "has no row below its header" in problem(table(tmp_path))
    path = table(tmp_path, {}, {"peak_mem_GiB": "forty"})
    assert problem(path) == "table.csv, line 3: peak_mem_GiB = 'forty' is not a number of at least 0."
    assert "tps_per_gpu = '-5' is not a number" in problem(table(tmp_path, {"tps_per_gpu": "-5"}))
    path = table(tmp_path, {})
    path.write_text(path.read_text() + "x,y\n")
    assert "line 3: it has not as many cells as the header" in problem(path)


def test_text_in_a_degree_skips_only_its_row(tmp_path: Path) -> None:
    first, second = rows.read(table(tmp_path, {"id": "x1", "tp": "two"}, {"id": "x2"}))
    assert first.memory_skip == "tp = 'two' is not a number"
    assert second.memory_skip is None
