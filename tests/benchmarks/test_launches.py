"""Counts of the kernels that a step launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks import launches
from estimator.throughput.launches import in_block

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one() -> Iterator[None]:
    """Be the only process of a group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_views_and_allocations_launch_nothing() -> None:
    operators = launches.Operators()
    operators.phase("forward")
    with operators:
        torch.empty(4, 4).t().reshape(2, 8)[0].detach()
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert operators.calls == {"forward": 4}  # a copy of the transposed matrix, two of ones, a product


@pytest.mark.parametrize(("name", "adapters"), [("full", False), ("adapters", True)])
def test_the_table_has_the_launches_of_a_block_of_the_installed_packages(name: str, adapters: bool) -> None:
    block = launches.rows_of("eager", name)[0]
    assert block[:3] == ["eager", name, "block"]
    assert sum(int(str(count)) for count in block[3:]) == pytest.approx(
        in_block("eager", adapters=adapters), rel=0.05
    )
