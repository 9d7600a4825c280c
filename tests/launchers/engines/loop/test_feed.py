"""The order of micro batches, and prefetching before the CPU waits for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launchers.dataset import batches
from launchers.dataset.prepared import Prepared
from launchers.engines.loop.feed import Feed
from launchers.engines.loop.tasks import NextToken
from tests.launchers.engines.loop import runs

STEPS = 3


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count tensors copied to a GPU, which stay on the CPU here."""
    copied_tensors: list[int] = []

    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        copied_tensors.append(tensor.numel())
        return tensor

    monkeypatch.setattr(batches, "copy_to_device", copied)
    return copied_tensors


def test_prefetched_batches_of_a_step_equal_those_read_directly(tmp_path: Path, copies: list[int]) -> None:
    data_dir = runs.make_data(tmp_path, runs.documents(12), batch=4, steps=STEPS)
    job = runs.make_job(
        tmp_path, tmp_path, data_dir, steps=STEPS, world=1, micro=2, accumulation=2, engine="fsdp2"
    )
    task, data = NextToken(None, fused=False), Prepared(data_dir)
    feed = Feed(task, data, job, 0, torch.device("cuda"))
    for step in range(STEPS):
        counts, batches_read = feed.step(step)
        expected = list(task.batches(data, job.plan.layout, step, 0))
        assert counts == task.counts(data, step, 4)
        for ours, theirs in zip(batches_read, expected, strict=True):
            assert torch.equal(ours.input_ids, theirs.input_ids)
        copies.clear()
        feed.prepare(step + 1)
        assert bool(copies) == (step + 1 < STEPS), "the first batch of a coming step is copied ahead"


def test_a_resumed_run_reads_the_batches_of_its_first_step(tmp_path: Path, copies: list[int]) -> None:
    data_dir = runs.make_data(tmp_path, runs.documents(12), batch=4, steps=STEPS)
    job: Any = runs.make_job(tmp_path, tmp_path, data_dir, steps=STEPS, world=1, micro=4, engine="fsdp2")
    feed = Feed(NextToken(None, fused=False), Prepared(data_dir), job, 0, torch.device("cuda"))
    feed.prepare(1)
    _, (batch,) = feed.step(2)
    assert copies
    assert batch.input_ids[0, 0] == Prepared(data_dir).row(8).tokens[0]
