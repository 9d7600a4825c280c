"""Training rows of the benchmarks: lengths as counted by the tokenization of the launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.on_gpu import data
from estimator.models import find
from launchers import settings
from launchers.dataset.prepared import Prepared, PreparedInfo
from launchers.models import tiny_llama
from launchers.run import preparation
from launchers.run_config import resolve

LONGEST = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny-llama")


def prepared(folder: Path, model: Path, **values: object) -> tuple[PreparedInfo, Prepared]:
    file = data.write(folder / "rows.jsonl", model, 80, LONGEST)
    chosen = settings.build(
        {"dataset": str(file), "seq_len": LONGEST, "evaluation": {"fraction": 0}, "max_steps": 4, **values}
    )
    conversations, held_out = preparation.read_data(chosen, folder)
    config = resolve(chosen, find("tiny-llama"), method="full", engine="torchtune")
    info = preparation.tokenize(conversations, held_out, config, model, folder / "data")
    return info, Prepared(folder / "data")


def test_lengths_are_log_uniform_and_include_the_longest() -> None:
    drawn = data.lengths(4000, 2048)
    assert max(drawn) == 2048 + data.SPARE
    assert min(drawn) >= 2048 * data.SHORTEST_SHARE - 1
    below = [sum(length < limit for length in drawn) / len(drawn) for limit in (256, 512, 1024)]
    assert below == pytest.approx([0.25, 0.5, 0.75], abs=0.03)


@pytest.mark.slow
def test_rows_have_the_sampled_lengths_and_the_longest_is_truncated_to_the_maximum(
    tmp_path: Path, model: Path
) -> None:
    info, rows = prepared(tmp_path, model, global_batch_size=20)
    assert (info.longest_row, info.truncated_rows, info.dropped_rows) == (LONGEST, 1, 0)
    expected = [min(length, LONGEST) for length in data.lengths(80, LONGEST)]
    assert sorted(rows.row_lengths.tolist()) == pytest.approx(sorted(expected), abs=8)


@pytest.mark.slow
def test_packed_rows_are_nearly_full(tmp_path: Path, model: Path) -> None:
    info, rows = prepared(tmp_path, model, packing=True, global_batch_size=4)
    assert info.packed
    assert info.tokens > 0.85 * info.rows * LONGEST
    assert len(rows.order) == 16


def test_an_existing_file_is_kept(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "mine"}) + "\n")
    assert data.write(file, model, 10, LONGEST).read_text() == '{"text": "mine"}\n'
