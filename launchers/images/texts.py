"""Caption embeddings by a pipeline's text encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def encode(tokens: tuple[torch.Tensor, ...], encoders: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both encoders' penultimate hidden layers, concatenated, and the last encoder's pooled output.

    ``tokens``: int64 [captions, 77] for each encoder.
    """
    import torch

    outputs = [encoder(ids, output_hidden_states=True) for ids, encoder in zip(tokens, encoders, strict=True)]
    return torch.cat([output.hidden_states[-2] for output in outputs], dim=-1), outputs[-1][0]
