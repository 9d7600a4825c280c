"""Rows of a prepared folder are read back unchanged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from launchers.dataset import prepared
from launchers.dataset.prepared import IGNORE, Prepared, Row
from tests.launchers.engines.loop import runs


def test_a_prepared_row_is_read_back_with_its_documents_judgments_and_images(tmp_path: Path) -> None:
    info = Prepared(runs.make_data(tmp_path / "any", runs.documents(3), batch=1, steps=3)).info
    images = [np.frombuffer(bytes([n] * n), dtype=np.uint8) for n in (1, 2, 3)]
    tokens = np.arange(5, dtype=np.int32)
    labels = np.array([IGNORE, 1, 2, IGNORE, 4], dtype=np.int32)
    row = Row(tokens=tokens, labels=labels, lengths=np.array([3, 2], dtype=np.int32))
    rows = [
        dataclasses.replace(row, images=images[:2], desirable=False),
        dataclasses.replace(row, tokens=tokens + 5),
        dataclasses.replace(row, images=images[2:]),
    ]
    prepared.write(tmp_path / "data", rows, np.arange(3, dtype=np.int32), info)
    data = Prepared(tmp_path / "data")
    for index, expected in enumerate(rows):
        stored_row = data.row(index)
        assert stored_row.tokens.tolist() == expected.tokens.tolist()
        assert stored_row.desirable == expected.desirable
        assert [image.tobytes() for image in stored_row.images] == [
            image.tobytes() for image in expected.images
        ]
        assert stored_row.positions.tolist() == [0, 1, 2, 0, 1]
        assert [document.labels.tolist() for document in stored_row.documents()] == [
            [IGNORE, 1, 2],
            [IGNORE, 4],
        ]
    assert data.row_lengths.tolist() == [5, 5, 5]
