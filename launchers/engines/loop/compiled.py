"""Blocks compiled by torch."""

from __future__ import annotations

from typing import Any

import torch

from launchers.engines.loop.families import blocks


def compile_blocks(network: Any) -> None:
    """Compile the forward pass of each block; hooks of the block itself run outside of the compiled code.

    Blocks are equal: code compiled for the first one is reused for the others.
    """
    for block in blocks(network):
        block.forward = torch.compile(block.forward)
    network.register_forward_pre_hook(_mark_lengths_dynamic, with_kwargs=True)


def _mark_lengths_dynamic(_network: Any, _inputs: Any, keyword_inputs: dict[str, Any]) -> None:
    """Avoid compiling again for each number of documents in a batch (variable-length attention)."""
    if (lengths := keyword_inputs.get("cu_seq_lens_q")) is not None:
        torch._dynamo.maybe_mark_dynamic(lengths, 0)
