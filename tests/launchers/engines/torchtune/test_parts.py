"""Data and schedules passed to the recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launchers.engines.loop import runs

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from launchers.dataset.prepared import IGNORE, Prepared  # noqa: E402
from launchers.engines.torchtune.parts import PadOnly, PreparedDataset, schedule  # noqa: E402

BATCH, STEPS, SEQ_LEN = 8, 5, 128


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return runs.make_data(tmp_path / "data", runs.documents(30), batch=BATCH, steps=STEPS)


def dataset(folder: Path, start_step: int = 0, packed: bool = False) -> PreparedDataset:
    return PreparedDataset(
        PadOnly(0), folder=str(folder), start_step=start_step, total_steps=STEPS, packed=packed
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("start_step", [0, 2])
def test_a_step_with_any_world_size_trains_on_exactly_its_rows(
    folder: Path, world: int, start_step: int
) -> None:
    data = Prepared(folder)
    rows_by_step: list[list[bytes]] = [[] for _ in range(STEPS)]
    for rank in range(world):
        rows = dataset(folder, start_step)
        sampler = DistributedSampler(rows, num_replicas=world, rank=rank, shuffle=False)
        loader = DataLoader(rows, batch_size=BATCH // world, sampler=sampler, collate_fn=list, drop_last=True)
        batches = list(loader)
        assert len(batches) == STEPS - start_step
        for step, batch in enumerate(batches, start=start_step):
            rows_by_step[step] += [row["tokens"].tobytes() for row in batch]
    for step in range(STEPS):
        expected = data.order[step * BATCH : (step + 1) * BATCH] if step >= start_step else []
        rows_of_step = [data.row(int(index)).tokens.astype(np.int64).tobytes() for index in expected]
        assert sorted(rows_by_step[step]) == sorted(rows_of_step)


def test_rows_and_tokens_are_counted_without_padding(folder: Path) -> None:
    rows = dataset(folder)
    lengths = [len(rows[index]["tokens"]) for index in range(3)]
    assert rows.take_counts() == (3, sum(lengths))
    assert rows.take_counts() == (0, 0)


def test_packed_rows_are_filled_up_with_a_document_of_padding(tmp_path: Path) -> None:
    documents = runs.documents(8)
    packed = [runs.joined(documents[:3]), runs.joined(documents[3:5])]
    folder = runs.make_data(tmp_path / "data", packed, batch=BATCH, steps=STEPS)
    rows = dataset(folder, packed=True)
    index = next(i for i in range(len(rows)) if rows._rows[i] == 0)
    rows.take_counts()
    row = rows[index]
    used = len(packed[0].tokens)
    assert {len(row[name]) for name in ("tokens", "labels", "input_pos")} == {SEQ_LEN}
    assert row["seq_lens"].tolist() == [*packed[0].lengths.tolist(), SEQ_LEN - used]
    assert row["input_pos"][:used].tolist() == packed[0].positions.tolist()
    assert set(row["labels"][used:].tolist()) == {IGNORE}
    assert rows.take_counts() == (1, used)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "linear"}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"name": "linear", "min_lr_ratio": 0.2}, [0.0, 0.5, 1.0, 0.8, 0.6, 0.4]),
        ({"name": "constant"}, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"name": "wsd", "decay_ratio": 0.3}, [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]),
    ],
)
def test_schedules_warm_up_and_resume(settings: dict[str, Any], expected: list[float]) -> None:
    def rates(last_epoch: int) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([{"params": [parameter], "initial_lr": 1.0}], lr=1.0)
        scheduler = schedule(
            optimizer, num_training_steps=6, last_epoch=last_epoch, warmup_steps=2, **settings
        )
        losses = []
        for _ in range(last_epoch + 1, 6):
            losses.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return losses

    assert (rates(-1), rates(2)) == (pytest.approx(expected), rates(-1)[3:])
