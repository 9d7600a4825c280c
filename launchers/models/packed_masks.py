"""Masks of packed rows for families whose code in transformers makes them without the positions.

Positions that restart mark the documents of a packed row. Without them, a mask lets each document attend to
earlier ones in its row.
"""

from __future__ import annotations

from typing import Any

from launchers.base.imports import imported_quietly

FAMILIES = ("gpt_oss",)  # transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssModel.forward


def separate_documents(network: Any) -> Any:
    """Make the model's masks depend on the positions, where its own code does not; return the model."""
    base = getattr(network, "base_model", network)
    if base.config.model_type in FAMILIES:
        base.register_forward_pre_hook(_add_masks, with_kwargs=True)
    return network


def _add_masks(base: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Replace the tokens by their embeddings, which have the masks' type, and add a mask for each kind."""
    positions, tokens = options.get("position_ids"), options.get("input_ids")
    has_mask = options.get("attention_mask") is not None or options.get("past_key_values") is not None
    if positions is None or tokens is None or has_mask:
        return None
    with imported_quietly():
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    values = {
        "config": base.config,
        "inputs_embeds": base.embed_tokens(tokens),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
    }
    masks = {
        "full_attention": create_causal_mask(**values),
        "sliding_attention": create_sliding_window_causal_mask(**values),
    }
    changed = {"input_ids": None, "inputs_embeds": values["inputs_embeds"], "attention_mask": masks}
    return arguments, options | changed
