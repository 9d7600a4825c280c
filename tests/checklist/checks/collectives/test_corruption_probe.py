"""Repetition of a matrix product on the processor of this machine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checklist.checks.collectives.corruption_probe import repeat


def context() -> Any:
    return SimpleNamespace(rank=0, local_rank=0, progress=SimpleNamespace(begin=lambda: None))


def test_a_healthy_processor_repeats_its_products_for_any_number_of_threads() -> None:
    first = repeat(context(), "cpu", 0.1)
    assert [(one["whole"], one["differing"]) for one in first] == [(False, 0), (True, 0)]
    assert all(one["times"] >= 8 for one in first)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        second = repeat(context(), "cpu", 0.0)
    finally:
        torch.set_num_threads(threads)
    assert first[1]["digest"] == second[1]["digest"]


def test_each_kind_of_product_gets_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0)
    clock = SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr("checklist.checks.collectives.corruption_probe.time", clock)
    # Eight without a look at the clock, then one for each second but the last
    assert [one["times"] for one in repeat(context(), "cpu", 40.0)] == [27, 27]


def test_a_single_flipped_bit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    product, calls = torch.matmul, [0]

    def flips(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        result = product(*operands, **options)
        calls[0] += 1
        if calls[0] == 5:
            result.view(torch.int32)[7, 11] ^= 1
        return result

    monkeypatch.setattr(torch, "matmul", flips)
    assert [one["differing"] for one in repeat(context(), "cpu", 0.0)] == [1, 0]
