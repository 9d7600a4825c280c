"""The model of a row: from the catalog, or from the dimensions in the row."""

from pathlib import Path

import pytest

from tests.benchmarks.published.measured_tables import read


def test_a_model_missing_from_the_catalog_is_built_from_the_dimensions_of_the_row(tmp_path: Path) -> None:
    row = read(tmp_path, model="an-own-model")
    assert row.setup is not None
    assert row.setup.model.parameters == 6_738_415_616


def test_the_parameter_count_decides_whether_the_mlp_is_gated(tmp_path: Path) -> None:
    plain = 32 * 2 * 4096 * 16384 + 32 * 4 * 4096 * 4096 + 50368 * 4096
    cells = {"ffn": "16384", "vocab": "50368", "tied": "", "n_params": str(plain)}
    row = read(tmp_path, model="some-plain-7b", **cells)
    assert row.setup is not None
    assert not row.setup.model.gated_mlp
    assert row.setup.model.tied_embeddings
    assert row.setup.model.parameters == pytest.approx(plain, rel=1e-3)


def test_dimensions_that_contradict_the_parameter_count_are_skipped(tmp_path: Path) -> None:
    row = read(tmp_path, model="an-own-model", n_params="12000000000")
    assert row.setup is None
    assert "6.74 billion parameters" in str(row.memory_skip)


def test_a_vocabulary_padded_by_its_framework_keeps_the_shape_of_the_model(tmp_path: Path) -> None:
    cells = {"hidden": "2048", "layers": "18", "heads": "8", "kv_heads": "1", "ffn": "16384", "tied": "1"}
    row = read(tmp_path, model="gemma-2b", vocab="256128", n_params="", **cells)
    assert row.setup is not None
    assert row.setup.model.vocab == 256128
    assert row.setup.model.head_dim == 256
