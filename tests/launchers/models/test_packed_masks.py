"""Masks of packed rows for families whose own code ignores the positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from launchers.models import causal, packed_masks

BORDER, LENGTH = 12, 20


def network() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=0,
    )
    config.initializer_range = 0.2
    return causal.class_of(config).from_config(config).eval()


@pytest.mark.parametrize("separated", [False, True])
def test_documents_of_a_packed_row_do_not_attend_to_each_other(*, separated: bool) -> None:
    model = network()
    if separated:
        packed_masks.separate_documents(model)
    tokens = torch.arange(3, 3 + LENGTH)[None]
    positions = torch.cat([torch.arange(BORDER), torch.arange(LENGTH - BORDER)])[None]
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part).logits for part in (tokens[:, :BORDER], tokens[:, BORDER:])]
    assert ((packed - torch.cat(alone, dim=1)).abs().max() < 1e-5) == separated


def test_answers_are_generated_as_without_it() -> None:
    tokens = torch.arange(3, 13)[None]
    answers = [
        model.generate(tokens, max_new_tokens=6, do_sample=False)
        for model in (network(), packed_masks.separate_documents(network()))
    ]
    assert torch.equal(*answers)
