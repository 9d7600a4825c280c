"""The share of a rank of the prepared rows, and the loss over them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launchers.dataset import batches
from launchers.dataset.measured import batches_by_length
from launchers.dataset.prepared import IGNORE, Prepared
from tests.launchers.engines.loop import runs


@pytest.mark.parametrize(("world", "micro", "accumulation"), [(1, 4, 3), (2, 3, 2), (3, 1, 4), (4, 3, 1)])
def test_every_row_of_a_step_is_processed_once_in_any_layout(
    tmp_path: Path, world: int, micro: int, accumulation: int
) -> None:
    rows = runs.documents(24)
    data = Prepared(runs.make_data(tmp_path, rows, batch=12, steps=2))
    layout = runs.make_job(
        tmp_path, tmp_path, tmp_path, steps=2, world=world, micro=micro, accumulation=accumulation
    ).plan.layout
    rows_seen, tokens = [], 0
    for rank in range(world):
        of_rank = list(batches.micro_batches(data, layout, 1, rank))
        assert [len(batch.input_ids) for batch in of_rank] == [micro] * accumulation
        for number, batch in enumerate(of_rank):
            for place, row in enumerate(batch.input_ids):
                index = 12 + (number * micro + place) * world + rank
                assert np.array_equal(row[: len(rows[index].tokens)].numpy(), rows[index].tokens)
                rows_seen.append(index)
            tokens += batch.tokens
    assert sorted(rows_seen) == list(range(12, 24))
    assert tokens == sum(len(row.tokens) for row in rows[12:])


def test_labels_are_the_next_tokens_and_padding_never_counts() -> None:
    rows = runs.documents(3)
    batch = batches.collate(rows, pad_id=7)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        assert batch.labels[index, : length - 1].tolist() == row.labels[1:].tolist()
        assert set(batch.labels[index, length - 1 :].tolist()) <= {IGNORE}
        assert set(batch.input_ids[index, length:].tolist()) <= {7}
    assert int((batch.labels != IGNORE).sum()) == sum(int((row.labels != IGNORE).sum()) for row in rows)


def test_the_chunked_loss_and_its_gradient_equal_those_of_the_full_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "LOSS_CHUNK", 4)
    logits = torch.randn(3, 5, 11, requires_grad=True)
    labels = torch.randint(0, 11, (3, 5))
    labels[0, :3] = IGNORE
    full_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    (expected_gradient,) = torch.autograd.grad(full_loss, logits)
    chunked = batches.summed_cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(chunked, logits)
    assert chunked.item() == pytest.approx(full_loss.item(), rel=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-6)


def test_counted_labels_of_a_step_are_summed_over_all_ranks(tmp_path: Path) -> None:
    rows = runs.documents(8)
    data = Prepared(runs.make_data(tmp_path, rows, batch=4, steps=2))
    expected_count = sum(int((row.labels != IGNORE).sum()) for row in rows[4:])
    assert batches.count_labels(data, 1, 4) == expected_count


class Rows:
    """Rows of these lengths; a pair has two."""

    def __init__(self, *lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def row(self, index: int) -> Any:
        return SimpleNamespace(lengths=np.array(self._lengths[index]))


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "expected"),
    [
        (30, None, [[1, 2, 0]]),
        (29, None, [[1, 2], [0]]),
        (30, 2, [[1, 2], [0]]),
        (30, 3, [[1, 2, 0]]),
        (9, None, [[1], [2], [0]]),
    ],
)
def test_a_batch_fills_its_tokens_and_rows_exactly(
    max_tokens: int, max_rows: int | None, expected: list[list[int]]
) -> None:
    rows = Rows((8,), (10,), (5, 4))  # a pair is two sequences as wide as its longer one
    assert list(batches_by_length(rows, range(3), max_tokens, max_rows)) == expected
    assert list(batches_by_length(rows, [], max_tokens, max_rows)) == []
