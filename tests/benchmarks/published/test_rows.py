"""Rows of published tables: what is read, and what is left out with a reason."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import rows
from benchmarks.published.cells import MEASURED
from tests.benchmarks.published.measured_tables import BASE, CARRIED, read


def test_every_carried_row_of_quality_a_is_read_for_what_was_measured() -> None:
    found = rows.read(CARRIED)
    assert len(found) > 800
    assert [row.id for row in found if row.quality == "A" and row.setup is None] == []
    assert [row.id for row in found if row.quality == "A" and row.gib and row.memory_skip] == []


def test_carried_rows_name_where_they_are_from_and_are_there_once() -> None:
    found = rows.read(CARRIED)
    assert all(row.source and row.quality in "AB" for row in found)
    assert len({row.id for row in found}) == len(found)


def test_the_processes_of_every_carried_row_are_its_gpus() -> None:
    wrong = [
        row.id
        for row in rows.read(CARRIED)
        if row.setup is not None and row.n_gpus is not None and row.setup.world_size != row.n_gpus
    ]
    assert wrong == []


def test_a_table_whose_unit_may_be_gb_or_gib_is_taken_in_the_middle(tmp_path: Path) -> None:
    assert read(tmp_path, peak_mem_GiB="", gib_min="40", gib_max="44").gib == 42


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB", "A100 SXM 80GB"),
        ("H100-96GB(HBM2e,500W)", "H100 SXM 96GB HBM2e 500W"),
        ("H200", "H200 SXM"),
        ("RTX4090", "RTX 4090"),
        ("A6000", "RTX A6000"),
        ("MI300X", "MI300X"),
        ("NVIDIA L40S", "L40S"),
        ("8xA100-40GB", "A100 SXM 40GB"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_a_table_gives_it(text: str, name: str) -> None:
    found = rows.find_gpu(text)
    assert found is not None
    assert found.name == name


def test_a_gpu_that_the_catalogue_lacks_leaves_the_memory_to_be_scored(tmp_path: Path) -> None:
    row = read(tmp_path, gpu="Z9000")
    assert row.memory_skip is None
    assert row.throughput_skip == "GPU 'Z9000' is not in the catalogue"


def test_a_row_of_lesser_quality_without_checkpointing_is_not_guessed_at(tmp_path: Path) -> None:
    assert read(tmp_path, quality="B", act_ckpt="").memory_skip == "activation checkpointing is not stated"
    assert read(tmp_path, quality="A", act_ckpt="").memory_skip is None


COLUMNS = [name for name in BASE if name not in MEASURED] + ["tp", "pp", "vpp", "cp", "ep", "sp", "quant"]
WORDS = ["", "0", "1", "2", "3", "8", "64", "n/a", "none", "full", "qlora", "selective", "fp8", "-1", "1.5"]


@given(st.sampled_from(COLUMNS), st.one_of(st.sampled_from(WORDS), st.text(max_size=20)))
def test_whatever_a_cell_says_its_row_is_read_or_left_out_with_a_reason(column: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        row = read(Path(folder), **{column: text})
    if row.setup is None:
        assert row.memory_skip
        assert row.throughput_skip
        assert row.verdict_skip
