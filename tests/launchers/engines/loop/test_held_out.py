"""Distribution of held-out rows over ranks, without a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from launchers.engines.loop.held_out import TextRows
from launchers.gang.rank import RankEnv
from tests.launchers.engines.loop import runs

ROWS = 7


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_make_the_same_number_of_passes_and_each_row_is_evaluated_once(
    tmp_path: Path, world: int
) -> None:
    runs.make_data(tmp_path / "heldout", runs.pairs(ROWS), batch=1, steps=ROWS)
    job = runs.make_job(tmp_path, tmp_path, tmp_path, steps=1, world=world, settings={"task": "dpo"})
    figures = np.arange(2.0 * ROWS).reshape(ROWS, 2)
    np.save(tmp_path / "reference.npy", figures)
    job = dataclasses.replace(job, held_out_reference=tmp_path / "reference.npy")
    measured = []
    for number in range(world):
        rank = RankEnv(rank=number, local_rank=number, world_size=world, local_world_size=world, node=0)
        rows = TextRows(job, rank)
        batches = list(rows.batches())
        assert (rows.count, len(batches)) == (ROWS, rows.passes)
        measured += [batch for batch, counts in batches if counts]
    assert rows.passes == -(-len(measured) // world)
    references = [tuple(row) for batch in measured for row in batch.reference.tolist()]
    assert sorted(references) == [tuple(row) for row in figures.tolist()]
    plain = TextRows(dataclasses.replace(job, held_out_reference=None), rank)
    assert [batch.reference for batch, _ in plain.batches()] == [None] * plain.passes
