"""CLIP's text encoders: their parameters, and what transformers' own keep for the backward pass."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from estimator.models.clip import TEXT_ADAPTED, TextEncoderShape
from estimator.models.diffusion import STABLE_DIFFUSION_XL
from estimator.models.unet import Adapters

BF16, FP32 = 2, 4
LORA, LORA_FP32 = Adapters(16, in_fp32=False), Adapters(16, in_fp32=True)
FIRST, SECOND = STABLE_DIFFUSION_XL.texts


def test_text_encoders_have_the_published_parameter_counts() -> None:
    assert (FIRST.parameters, SECOND.parameters) == (123_060_480, 694_659_840)


@pytest.mark.parametrize(
    ("shape", "size", "adapters", "recomputed", "traced"),
    [
        # Of the first encoder without its last layer, whose result is not used. transformers 5.4, torch 2.13
        (FIRST, BF16, LORA, False, 21_458_976 * 11 // 12),
        (FIRST, BF16, LORA_FP32, False, 31_512_096 * 11 // 12),
        (FIRST, FP32, LORA_FP32, False, 42_873_600 * 11 // 12),
        (SECOND, BF16, LORA, False, 69_918_464),
        (SECOND, BF16, LORA_FP32, False, 114_388_736),
        (SECOND, BF16, LORA, True, 6_307_840),
    ],
)
def test_a_caption_saves_the_traced_bytes(
    shape: TextEncoderShape, size: int, adapters: Adapters, recomputed: bool, traced: int
) -> None:
    assert shape.saved_bytes(size, adapters, recomputed=recomputed) == traced


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quick", "adapters", "recomputed"),
    [(True, LORA, False), (False, LORA_FP32, False), (False, LORA, True), (True, LORA_FP32, True)],
)
def test_a_small_encoder_saves_the_bytes_of_a_fresh_trace(
    quick: bool, adapters: Adapters, recomputed: bool
) -> None:
    shape = TextEncoderShape(
        name="small", width=64, layers=3, inner=256, heads=4, projection=64, vocabulary=500, quick=quick
    )
    saved = traced_bytes(shape, adapters, recomputed=recomputed)
    # the tokens, and what the last norm keeps
    around = saved - shape.saved_bytes(BF16, adapters, recomputed=recomputed)
    assert 0 <= around < 2 * 77 * 64 * 2


def traced_bytes(shape: TextEncoderShape, adapters: Adapters, *, recomputed: bool) -> int:
    """Bytes that autograd has saved after a caption's forward pass, the parameters aside."""
    torch = pytest.importorskip("torch")
    from peft import LoraConfig, inject_adapter_in_model
    from torch.utils.checkpoint import checkpoint
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        projection_dim=shape.projection,
        vocab_size=shape.vocabulary,
        hidden_act="quick_gelu" if shape.quick else "gelu",
    )
    encoder = CLIPTextModelWithProjection(config).to(torch.bfloat16).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=adapters.rank, target_modules=list(TEXT_ADAPTED)), encoder)
    for parameter in encoder.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if adapters.in_fp32 else torch.bfloat16)
    encoder.train()
    if recomputed:
        for module in encoder.modules():
            if type(module).__name__ == "CLIPEncoderLayer":
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    own = {each.untyped_storage()._cdata for each in itertools.chain(encoder.parameters(), encoder.buffers())}
    saved: dict[int, int] = {}
    kept: list[Any] = []  # a storage's identity counts only as long as it lives

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = encoder(torch.zeros(1, 77, dtype=torch.long), output_hidden_states=True)
    assert output.text_embeds is not None
    return sum(saved.values())
