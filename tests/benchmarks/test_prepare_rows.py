"""``python -m benchmarks.prepare_rows``: one measurement."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks import prepare_rows


@pytest.mark.slow
def test_rows_are_prepared_and_measured() -> None:
    figures = prepare_rows.measure(64, "pretrain", packing=True)
    assert figures["rows"] == 64
    assert figures["tokens"] > 64
    assert figures["memory_mib"] >= 0
