"""What is in flight beside states and activations: FSDP2's copies, also in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.published import rows
from estimator import memory
from estimator.plan import GIB

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

ON_H200 = [
    row
    for row in rows.read(rows.TABLE)
    if row.source.startswith("benchmarks.on_gpu") and row.kind == "allocated" and row.n_gpus == 1
]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("row", ON_H200, ids=[row.id for row in ON_H200])
def test_live_memory_is_that_of_this_packages_own_runs_within_1_percent(row: rows.PublishedRow) -> None:
    assert row.setup is not None
    assert memory.range_of(row.setup, "allocated").likely_bytes / GIB == pytest.approx(row.gib, rel=0.01)


@pytest.mark.usefixtures("alone")
def test_fsdp2_in_one_process_copies_the_weights_and_frees_the_roots_after_the_forward_pass() -> None:
    """What torch does where the root is told to reshard, as launchers/engines/fsdp2/sharding.py does."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": policy}
    root = nn.ModuleDict({"block": network[0], "head": network[1]})
    seen: list[torch.dtype] = []

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = root

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            inner = self.parts["block"](given)
            seen.append(self.parts["head"].weight.dtype)
            result: torch.Tensor = self.parts["head"](inner)
            return result

    whole = Whole()
    fully_shard(root["block"], reshard_after_forward=True, **options)
    fully_shard(whole, reshard_after_forward=True, **options)
    whole(torch.ones(1, 4))
    assert seen == [torch.bfloat16], "a copy in 16 bits of the 32 that one process holds whole"
    assert isinstance(root["head"].weight, DTensor), "what is kept is there again"
    assert root["head"].weight.dtype == torch.float32
