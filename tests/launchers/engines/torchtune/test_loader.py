"""Batches on the device ahead of their use, and the counts of those that the recipe received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launchers.engines.loop import runs
from tests.optional import require_torchtune

torch = pytest.importorskip("torch")
require_torchtune()

from torch.utils.data import DataLoader  # noqa: E402

from launchers.engines.torchtune import loader as torchtune_loader  # noqa: E402
from launchers.engines.torchtune.loader import (  # noqa: E402
    DeviceLoader,
    document_ids_copied_without_waiting,
)
from launchers.engines.torchtune.parts import PadOnly, PreparedDataset  # noqa: E402

ROWS, STEPS, CPU = 6, 3, torch.device("cpu")


@pytest.fixture
def dataset(tmp_path: Path) -> PreparedDataset:
    runs.make_data(tmp_path, runs.documents(ROWS), batch=2, steps=STEPS)
    return PreparedDataset(PadOnly(0), folder=str(tmp_path), start_step=0, total_steps=STEPS, packed=False)


def collate(rows: list[Any]) -> dict[str, Any]:
    (row,) = rows
    return {"tokens": torch.from_numpy(row["tokens"]), "mask": None}


def loader_of(dataset: PreparedDataset, device: Any = CPU, last: int = ROWS) -> DeviceLoader:
    numbers: list[int] = []
    loader = DataLoader(dataset, batch_size=1, collate_fn=collate)
    made = DeviceLoader(loader, device, before=numbers.append, is_last=lambda: numbers[-1] == last)
    made.numbers = numbers  # type: ignore[attr-defined]
    return made


def test_a_batch_read_ahead_counts_once_the_recipe_receives_it(dataset: PreparedDataset) -> None:
    lengths = [len(dataset[index]["tokens"]) for index in range(ROWS)]
    dataset.take_counts()
    loader = loader_of(dataset)
    assert len(loader) == ROWS
    received = []
    for batch in loader:
        loader.prepare()
        loader.prepare()
        received.append(len(batch["tokens"]))
        assert loader.take_counts() == (1, received[-1])
    assert received == lengths, "in order, none twice"
    assert loader.numbers == [1, 2, 3, 4, 5, 6]  # type: ignore[attr-defined]


def test_the_iteration_ends_once_the_run_is_finished(dataset: PreparedDataset) -> None:
    assert len(list(loader_of(dataset, last=4))) == 4


def test_the_next_batch_is_copied_to_the_gpu_while_the_recipe_uses_one(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    monkeypatch.setattr(torchtune_loader, "copy_to_device", lambda tensor, _: copied.append(tensor) or tensor)
    loader = loader_of(dataset, torch.device("cuda"))
    batches = iter(loader)
    next(batches)
    assert len(copied) == 1
    loader.prepare()
    assert len(copied) == 2
    second = next(batches)
    assert second["tokens"] is copied[1]
    assert second["mask"] is None, "flex attention's mask stays as it is"


def test_document_ids_are_those_of_torchtune() -> None:
    from torchtune.modules import attention_utils

    lengths = [torch.tensor([2, 3, 1]), torch.tensor([5, 1])]
    expected = attention_utils._get_document_ids_from_seq_lens(lengths)
    original = attention_utils._get_document_ids_from_seq_lens
    with document_ids_copied_without_waiting(CPU):
        assert attention_utils._get_document_ids_from_seq_lens is not original
        assert torch.equal(attention_utils._get_document_ids_from_seq_lens(lengths), expected)
    assert attention_utils._get_document_ids_from_seq_lens is original
