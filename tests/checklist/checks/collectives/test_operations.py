"""Values of collectives distinguish a wrong or partial result from a right one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from checklist.checks.collectives import operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_a_sum_that_omits_or_repeats_a_rank_is_detected(dtype: torch.dtype, world: int) -> None:
    builder = operations._Builder(dtype, 4099, 0, world, torch.device("cpu"))
    indexes = torch.arange(4099)
    parts = [builder.values(rank, indexes, builder.addend) for rank in range(world)]
    right = sum(parts)
    assert torch.equal(builder.summed(indexes), right)
    assert torch.equal(right.to(dtype).to(torch.int64), right), "exact in the type"
    for left_out, twice in product(range(min(world, 4)), repeat=2):
        assert not torch.equal(right - parts[left_out], right)
        if left_out != twice and builder.addend > 1:
            assert not torch.equal(right - parts[left_out] + parts[twice], right)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_an_uneven_all_to_all_detects_a_part_at_the_wrong_position(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate all ranks in one process: the parts that each sends are passed to the others."""
    calls: list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]] = []
    monkeypatch.setattr("torch.distributed.all_to_all_single", lambda *fixed_part: calls.append(fixed_part))
    works = [
        operations.prepare("all_to_all_v", torch.float32, 97, rank, world, torch.device("cpu"))
        for rank in range(world)
    ]
    for work in works:
        work.run()
    for to, (target, _, expected_sizes, _) in enumerate(calls):
        parts = [source.split(sizes)[to] for _, source, _, sizes in calls]
        assert [part.numel() for part in parts] == expected_sizes
        target.copy_(torch.cat(parts))
    assert [operations.wrong_values(work) for work in works] == [0] * world
    calls[0][0].copy_(calls[0][0].roll(1))
    assert operations.wrong_values(works[0]) > 0


def test_wrong_values_are_counted_including_nan() -> None:
    builder = operations._Builder(torch.float32, 100, 0, 2, torch.device("cpu"))
    good = builder.values(1, torch.arange(100)).to(torch.float32)
    bad = good.clone()
    bad[7] += 1
    nan = good.clone()
    nan[3] = float("nan")

    def work(values_of_rank: torch.Tensor) -> operations.Work:
        return operations.Work(
            run=lambda: None, result=lambda: [values_of_rank], expected=lambda _, i: builder.values(1, i)
        )

    assert [operations.wrong_values(work(values_of_rank)) for values_of_rank in (good, bad, nan)] == [0, 1, 1]
