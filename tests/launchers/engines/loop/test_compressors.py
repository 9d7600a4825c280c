"""Compressed attention of rows shorter than one window."""

from __future__ import annotations

import torch

from launchers.engines.loop.compressors import fill_windows
from tests.launchers.engines.loop import families


def test_a_row_shorter_than_a_window_has_the_same_logits_and_a_gradient_for_every_parameter() -> None:
    """Without gradients for some parameters, a rank would join fewer collectives than the others."""
    tokens = torch.tensor([[5, 7, 9]])
    network = families.network("deepseek_v4")
    expected = network(tokens, use_cache=False).logits
    fill_windows(network)
    logits = network(tokens, use_cache=False).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    untrained = {name for name, weight in network.named_parameters() if weight.grad is None}
    assert {name for name in untrained if ".indexer." not in name} == set()
