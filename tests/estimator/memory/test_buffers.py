"""What is in flight beside states and activations: FSDP2's copies, also in one process."""

from __future__ import annotations

import pytest

from benchmarks.published import rows
from estimator import memory
from estimator.plan import GIB

ON_H200 = [
    row
    for row in rows.read(rows.TABLE)
    if row.source.startswith("benchmarks.on_gpu") and row.kind == "allocated" and row.n_gpus == 1
]


@pytest.mark.parametrize("row", ON_H200, ids=[row.id for row in ON_H200])
def test_predicted_live_memory_is_within_1_percent_of_measured_runs(row: rows.PublishedRow) -> None:
    assert row.setup is not None
    assert memory.range_of(row.setup, "allocated").likely_bytes / GIB == pytest.approx(row.gib, rel=0.01)
