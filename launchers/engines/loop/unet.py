"""The UNet of a pipeline that makes images, with what is trained of it: as the loop holds language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from estimator.models.unet import ADAPTED
from launchers.gang.job import TrainJob
from launchers.imports import collector_paused

FOLDER = "unet"
_BLOCKS = ("ResnetBlock2D", "BasicTransformerBlock")


def is_unet(network: Any) -> bool:
    """Whether this is a UNet, divided or not."""
    return type(network).__name__.endswith("UNet2DConditionModel")


def blocks(network: nn.Module) -> list[nn.Module]:
    """What is divided and recomputed one by one: residual blocks and transformers' blocks."""
    return [module for module in network.modules() if type(module).__name__ in _BLOCKS]


def load(job: TrainJob, dtype: torch.dtype) -> Any:
    """The job's UNet with its weights."""
    with collector_paused():
        from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(job.model_dir / FOLDER, torch_dtype=dtype)


def build(job: TrainJob, dtype: torch.dtype) -> Any:
    """The job's UNet without its weights."""
    with collector_paused():
        from diffusers import UNet2DConditionModel

    configuration = UNet2DConditionModel.load_config(job.model_dir / FOLDER)
    return UNet2DConditionModel.from_config(configuration).to(dtype)


def add_adapters(network: Any, job: TrainJob) -> Any:
    """The same UNet, frozen, with LoRA on both attentions of every block."""
    from peft import LoraConfig

    lora = job.settings.lora
    network.requires_grad_(False)
    network.add_adapter(
        LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            lora_dropout=lora.dropout,
            init_lora_weights="gaussian",
            use_rslora=lora.rslora,
            target_modules=list(ADAPTED),
        )
    )
    return network
