"""Rows of published tables: which are read, and which are skipped with a reason."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import rows
from benchmarks.published.cells import MEASURED
from tests.benchmarks.published.measured_tables import BASE, CARRIED, read


def test_every_included_row_of_quality_a_has_the_measured_setup() -> None:
    table = rows.read(CARRIED)
    assert len(table) > 800
    assert [row.id for row in table if row.quality == "A" and row.setup is None] == []
    assert [row.id for row in table if row.quality == "A" and row.gib and row.memory_skip] == []


def test_included_rows_name_their_source_and_are_unique() -> None:
    table = rows.read(CARRIED)
    assert all(row.source and row.quality in "AB" for row in table)
    assert len({row.id for row in table}) == len(table)


def test_every_included_row_has_one_process_per_gpu() -> None:
    wrong = [
        row.id
        for row in rows.read(CARRIED)
        if row.setup is not None and row.n_gpus is not None and row.setup.world_size != row.n_gpus
    ]
    assert wrong == []


def test_an_ambiguous_gb_or_gib_is_read_as_the_mean(tmp_path: Path) -> None:
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
def test_gpus_are_recognized_by_the_names_in_tables(text: str, name: str) -> None:
    gpu = rows.find_gpu(text)
    assert gpu is not None
    assert gpu.name == name


def test_memory_is_scored_for_a_gpu_missing_from_the_catalog(tmp_path: Path) -> None:
    row = read(tmp_path, gpu="Z9000")
    assert row.memory_skip is None
    assert row.throughput_skip == "GPU 'Z9000' is not in the catalogue"


@pytest.mark.parametrize("note", ["the page states slow PCIe lanes", "known regression (footnote)"])
def test_a_speed_that_its_publication_calls_slow_is_not_scored(note: str, tmp_path: Path) -> None:
    assert read(tmp_path).throughput_skip is None
    assert "the publication states" in str(read(tmp_path, notes=note).throughput_skip)


def test_unstated_checkpointing_in_a_lower_quality_row_is_not_guessed(tmp_path: Path) -> None:
    assert read(tmp_path, quality="B", act_ckpt="").memory_skip == "activation checkpointing is not stated"
    assert read(tmp_path, quality="A", act_ckpt="").memory_skip is None


COLUMNS = [name for name in BASE if name not in MEASURED] + ["tp", "pp", "vpp", "cp", "ep", "sp", "quant"]
WORDS = ["", "0", "1", "2", "3", "8", "64", "n/a", "none", "full", "qlora", "selective", "fp8", "-1", "1.5"]


@given(st.sampled_from(COLUMNS), st.one_of(st.sampled_from(WORDS), st.text(max_size=20)))
def test_any_row_is_read_or_skipped_with_a_reason(column: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        row = read(Path(folder), **{column: text})
    if row.setup is None:
        assert row.memory_skip
        assert row.throughput_skip
        assert row.verdict_skip
