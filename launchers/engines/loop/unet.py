"""Loads the UNet of an image pipeline and selects its trained parameters, as model.py for language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from estimator.models.unet import ADAPTED
from launchers.base.imports import collector_paused, import_peft
from launchers.gang.job import TrainJob

FOLDER = "unet"
_BLOCKS = ("ResnetBlock2D", "BasicTransformerBlock", "CLIPEncoderLayer")


def is_unet(network: Any) -> bool:
    """Whether this is a UNet, sharded or not, alone or with text encoders."""
    return type(network).__name__.endswith(("UNet2DConditionModel", "UNetWithTexts"))


def has_texts(network: Any) -> bool:
    """Whether this is a UNet with trained text encoders, sharded or not."""
    return type(network).__name__.endswith("UNetWithTexts")


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return the units of sharding and recomputation: residual blocks and transformer blocks."""
    return [module for module in network.modules() if type(module).__name__ in _BLOCKS]


def load(job: TrainJob, dtype: torch.dtype) -> Any:
    """Load the job's UNet with its weights."""
    with collector_paused():
        from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel.from_pretrained(job.model_dir / FOLDER, torch_dtype=dtype)
    return _with_text_encoders(network, job, dtype, weights=True)


def build(job: TrainJob, dtype: torch.dtype) -> Any:
    """Build the job's UNet without its weights."""
    with collector_paused():
        from diffusers import UNet2DConditionModel

    configuration = UNet2DConditionModel.load_config(job.model_dir / FOLDER)
    return _with_text_encoders(
        UNet2DConditionModel.from_config(configuration).to(dtype), job, dtype, weights=False
    )


def _with_text_encoders(network: Any, job: TrainJob, dtype: torch.dtype, *, weights: bool) -> Any:
    """Return the UNet, with its text encoders if those are trained."""
    if not job.settings.images.text_encoders:
        return network
    from launchers.engines.loop.text_encoders import with_texts

    return with_texts(network, job, dtype, weights=weights)


def add_adapters(network: Any, job: TrainJob) -> Any:
    """Freeze the UNet and add LoRA to both attentions of every block; also to its text encoders."""
    import_peft()
    from peft import LoraConfig

    lora = job.settings.lora
    options: dict[str, Any] = {
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "init_lora_weights": "gaussian",
        "use_rslora": lora.rslora,
    }
    unet = network.unet if has_texts(network) else network
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(target_modules=list(ADAPTED), **options))
    if has_texts(network):
        from launchers.engines.loop import text_encoders

        text_encoders.add_adapters(network, options)
    return network
