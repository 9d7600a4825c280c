"""The UNet's parameters, and what it keeps for its backward pass, as a trace of diffusers has them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest

from estimator.models.diffusion import STABLE_DIFFUSION_XL
from estimator.models.unet import Adapters, UNetShape

SHAPE = STABLE_DIFFUSION_XL.unet
BF16, FP32 = 2, 4
LORA, LORA_FP32 = Adapters(16, in_fp32=False), Adapters(16, in_fp32=True)

# (latent's width, height, bytes an element, adapters, recomputed, gradients go back to the texts) -> bytes
# that autograd has saved after the forward pass of diffusers 0.42.1's UNet2DConditionModel for one image,
# without the parameters themselves (torch 2.13, peft 0.18.1, FakeTensorMode on a CPU)
Traced = tuple[int, int, int, Adapters | None, bool, bool]
TRACED: dict[Traced, int] = {
    (128, 128, BF16, None, False, False): 6_887_677_824,
    (125, 127, BF16, None, False, False): 6_844_371_352,
    (64, 96, FP32, None, False, False): 5_193_355_008,
    (128, 128, BF16, LORA, False, False): 5_604_616_960,
    (64, 64, BF16, LORA_FP32, False, False): 2_038_414_976,
    (128, 128, BF16, None, True, False): 574_247_040,
    (64, 64, BF16, LORA, True, False): 118_624_128,
    (64, 64, BF16, LORA_FP32, True, False): 118_624_128,
    (128, 128, BF16, LORA, False, True): 5_743_575_552,
    (64, 96, BF16, LORA, False, True): 2_170_276_352,
    (64, 64, BF16, LORA_FP32, False, True): 2_073_159_040,
    (64, 64, BF16, LORA, True, True): 122_558_976,
    (64, 64, BF16, LORA_FP32, True, True): 122_558_976,
}
CONFIG: dict[str, Any] = {  # stable-diffusion-xl-base-1.0, unet/config.json
    "sample_size": 128,
    "in_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def test_a_unet_s_config_is_read_as_its_shape() -> None:
    assert UNetShape.of_config(CONFIG) == SHAPE


@pytest.mark.parametrize(
    "change", [{"addition_embed_type": None}, {"in_channels": 9}, {"attention_head_dim": [5]}]
)
def test_an_unsupported_kind_of_unet_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        UNetShape.of_config(CONFIG | change)


def test_the_unet_has_the_published_parameter_count() -> None:
    assert (SHAPE.parameters, SHAPE.units) == (2_567_463_684, 87)


def test_rank_16_lora_on_all_attentions_has_the_weight_count_of_peft() -> None:
    assert SHAPE.lora_parameters(16) == 23_224_320


@pytest.mark.parametrize("run", TRACED)
def test_activations_match_the_recorded_traces_of_the_unet(run: Traced) -> None:
    *size, adapters, recomputed, texts = run
    found = SHAPE.saved_bytes(*size, adapters=adapters, recomputed=recomputed, texts_trained=texts)
    assert found == TRACED[run]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("run", TRACED)
def test_a_new_trace_gives_the_recorded_bytes(run: Traced) -> None:
    pytest.importorskip("diffusers")
    assert traced_bytes(*run) == TRACED[run]


def test_the_largest_unit_saves_below_a_twentieth_of_all_activations() -> None:
    whole, unit = SHAPE.saved_bytes(128, 128, BF16), SHAPE.largest_unit_saves(128, 128, BF16, None)
    assert 0 < unit < whole / 20


def traced_bytes(
    width: int, height: int, size: int, adapters: Adapters | None, recomputed: bool, texts_trained: bool
) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    kind = {BF16: torch.bfloat16, FP32: torch.float32}[size]
    saved: dict[int, int] = {}
    kept: list[Any] = []  # a storage's identity counts only as long as it lives
    with FakeTensorMode():
        unet = _unet(kind, adapters, recomputed=recomputed)
        own = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage.nbytes()
                kept.append(tensor)
            return tensor

        summary = torch.empty(1, 1280, dtype=kind, requires_grad=texts_trained)
        added = {"text_embeds": summary, "time_ids": torch.empty(1, 6, dtype=kind)}
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            unet(
                torch.empty(1, 4, height, width, dtype=kind),
                torch.empty(1, dtype=torch.int64),
                torch.empty(1, 77, 2048, dtype=kind, requires_grad=texts_trained),
                added_cond_kwargs=added,
            )
    return sum(saved.values())


def _unet(kind: Any, adapters: Adapters | None, *, recomputed: bool) -> Any:
    import torch
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig
    from torch.utils.checkpoint import checkpoint

    try:
        torch.set_default_dtype(kind)
        unet = UNet2DConditionModel(**CONFIG).train()
        if adapters is not None:
            torch.set_default_dtype(torch.float32 if adapters.in_fp32 else kind)
            unet.requires_grad_(False)
            targets = ["to_q", "to_k", "to_v", "to_out.0"]
            # Parameters that are fake cannot be moved, and they are made in their type
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
                unet.add_adapter(LoraConfig(r=adapters.rank, target_modules=targets))
    finally:
        torch.set_default_dtype(torch.float32)
    for module in unet.modules():
        if recomputed and type(module).__name__ in ("ResnetBlock2D", "BasicTransformerBlock"):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return unet
