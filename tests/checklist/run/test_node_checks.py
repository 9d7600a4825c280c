"""Measurements that a rank makes alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from checklist.run import node_checks

CPU = torch.device("cpu")


def speeds_in_turn(monkeypatch: pytest.MonkeyPatch, speeds: list[float]) -> None:
    """Simulate matrix products with these speeds, in turn and repeated."""
    reported = itertools.cycle(speeds)
    monkeypatch.setattr(node_checks, "_product", lambda *_: lambda: next(reported))


def test_a_burst_reports_its_fastest_product_and_a_load_all_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds_in_turn(monkeypatch, [690.0, *[764.0] * 7, *[655.0] * 12])
    assert node_checks._burst(CPU, torch.bfloat16) == [764.0] * node_checks._FASTEST
    assert sorted(node_checks._load(CPU, torch.bfloat16, 0.0)) == [
        690.0,
        *[764.0] * (node_checks._FEWEST - 1),
    ]


def test_measured_matrix_products_are_correct() -> None:
    burst, load = node_checks._burst(CPU, torch.float32), node_checks._load(CPU, torch.float32, 0.0)
    assert (len(burst), len(load)) == (node_checks._FASTEST, node_checks._FEWEST)
    assert all(value > 0 for value in (*burst, *load))


def test_the_rate_of_a_copy_counts_its_bytes_once_and_a_bidirectional_copy_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_checks, "_timed", lambda *_: 0.5)
    assert set(node_checks._copies(CPU, CPU, 10**6)) == {0.002}
    assert set(node_checks._copies(CPU, CPU, 10**6, both_ways=True)) == {0.004}
