"""Stable Diffusion XL: parameters as published, activations as a trace of diffusers has them."""

from __future__ import annotations

from typing import Any

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models.diffusion import STABLE_DIFFUSION_XL, unet_activation_bytes

# (width, height, batch, dtype) -> bytes that autograd has saved after the forward pass of diffusers 0.42.1's
# UNet2DConditionModel, without the parameters themselves (torch 2.13, FakeTensorMode on a CPU).
TRACED = {
    (1024, 1024, 1, "bf16"): 6_887_677_824,
    (512, 768, 2, "fp32"): 10_386_710_016,
    (1000, 1016, 1, "bf16"): 6_844_371_352,
    (512, 512, 3, "bf16"): 5_224_279_680,
}


def test_each_component_has_the_published_number_of_parameters() -> None:
    assert dict(STABLE_DIFFUSION_XL.components) == {
        "UNet": 2_567_463_684,
        "text encoder (CLIP ViT-L)": 123_060_480,
        "text encoder 2 (OpenCLIP bigG)": 694_659_840,
        "VAE": 83_653_863,
    }
    assert STABLE_DIFFUSION_XL.parameters == 3_468_837_867
    assert STABLE_DIFFUSION_XL.trained_parameters == 2_567_463_684


@pytest.mark.parametrize("run", TRACED)
def test_activations_are_those_of_the_traced_unet(run: tuple[int, int, int, str]) -> None:
    assert unet_activation_bytes(*run) == TRACED[run]


@pytest.mark.slow
@pytest.mark.parametrize("run", TRACED)
def test_the_trace_gives_the_same_again(run: tuple[int, int, int, str]) -> None:
    pytest.importorskip("diffusers")
    assert traced_activation_bytes(*run) == TRACED[run]


def traced_activation_bytes(width: int, height: int, batch: int, dtype: str) -> int:
    import torch
    from diffusers import UNet2DConditionModel
    from torch._subclasses.fake_tensor import FakeTensorMode

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    saved: dict[int, int] = {}
    kept: list[Any] = []  # a storage's identity counts only as long as it lives
    with FakeTensorMode():
        torch.set_default_dtype(kind)
        try:
            unet = UNet2DConditionModel(**UNET_CONFIG).train()
        finally:
            torch.set_default_dtype(torch.float32)
        own = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage.nbytes()
                kept.append(tensor)
            return tensor

        added = {
            "text_embeds": torch.empty(batch, 1280, dtype=kind),
            "time_ids": torch.empty(batch, 6, dtype=kind),
        }
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            unet(
                torch.empty(batch, 4, height // 8, width // 8, dtype=kind),
                torch.empty(batch, dtype=torch.int64),
                torch.empty(batch, 77, 2048, dtype=kind),
                added_cond_kwargs=added,
            )
    return sum(saved.values())


UNET_CONFIG: dict[str, Any] = {  # stable-diffusion-xl-base-1.0, unet/config.json
    "sample_size": 128,
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


def test_activations_grow_with_the_batch_and_the_image() -> None:
    one = unet_activation_bytes(512, 512, 1, "bf16")
    assert unet_activation_bytes(512, 512, 4, "bf16") == 4 * one
    assert unet_activation_bytes(512, 1024, 1, "bf16") > 1.9 * one


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ((1000, 1001, 1, "bf16"), "height = 1001"),
        ((0, 1024, 1, "bf16"), "width = 0"),
        ((1024, 1024, 0, "bf16"), "batch = 0"),
        ((1024, 1024, 1, "int8"), "dtype = 'int8'"),
    ],
)
def test_a_wrong_image_batch_or_type_is_named(run: tuple[int, int, int, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        unet_activation_bytes(*run)


@pytest.mark.parametrize("name", ["stable-diffusion-xl", "SDXL", "stabilityai/stable-diffusion-xl-base-1.0"])
def test_its_names_find_it_but_not_as_a_language_model(name: str) -> None:
    assert models.find_any(name) is STABLE_DIFFUSION_XL
    for find in (models.find, models.resolve):
        with pytest.raises(UserError) as caught:
            find(name)
        assert "language models only" in caught.value.problem
        assert "finetune estimate --model stable-diffusion-xl" in caught.value.advice
