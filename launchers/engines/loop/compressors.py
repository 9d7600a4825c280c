"""Compressed attention of rows that are shorter than one window of tokens (DeepSeek V4).

transformers' compressors skip such rows, so that their norm and position biases get no gradients. A rank with
short rows alone would then join fewer collectives than the others, which wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad


def fill_windows(network: nn.Module) -> None:
    """Make compressors fill rows up to one window, whose compressed token no query attends to."""
    for name, module in network.named_modules():
        if name.endswith(".compressor"):
            _fill_window(module)


def _fill_window(compressor: Any) -> None:
    """Replace the compressor's forward pass for rows without a cache (DeepseekV4CSACompressor and HCA's).

    The compressed token contains tokens after the row's end, so the causal threshold excludes it: its
    gradients are 0, but they exist.
    """
    forward, window = compressor.forward, compressor.compress_rate

    def filled(
        hidden: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor, cache: Any, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        length = hidden.shape[1]
        missing = window - length
        if cache is not None or missing <= 0:
            result: tuple[torch.Tensor, torch.Tensor | None] = forward(
                hidden, queries, positions, cache, layer
            )
            return result
        hidden, queries = (pad(tensor, (0, 0, 0, missing)) for tensor in (hidden, queries))
        further = torch.arange(1, missing + 1, device=positions.device)
        compressed, bias = forward(
            hidden, queries, torch.cat([positions, positions[:, -1:] + further], 1), cache, layer
        )
        return compressed, bias[:, :, :length]

    compressor.forward = filled
