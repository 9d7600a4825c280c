"""A UNet together with its pipeline's text encoders, for runs that train both; the inputs are captions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from estimator.models.clip import TEXT_ADAPTED
from launchers.base.imports import collector_paused
from launchers.gang.job import TrainJob
from launchers.images.texts import encode

ENCODERS = ("text_encoder", "text_encoder_2")


class UNetWithTexts(nn.Module):
    """Drop-in replacement of a UNet that accepts the captions' tokens as well as their embeddings.

    All three networks are one module, so that sharding gathers the weights of each when it is used. Call only
    this module, never a network inside it.
    """

    def __init__(self, unet: Any, text_encoder: Any, text_encoder_2: Any) -> None:
        super().__init__()
        self.unet, self.text_encoder, self.text_encoder_2 = unet, text_encoder, text_encoder_2

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the UNet."""
        dtype: torch.dtype = self.unet.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the UNet."""
        device: torch.device = self.unet.device
        return device

    @property
    def config(self) -> Any:
        """Configuration of the UNet."""
        return self.unet.config

    @property
    def add_embedding(self) -> Any:
        """Embedding of the UNet's added conditions; diffusers' pipeline reads its width."""
        return self.unet.add_embedding

    def forward(
        self,
        sample: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        *arguments: Any,
        tokens: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        time_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return the UNet's prediction, or, without a sample, the embeddings of ``tokens``.

        Parameters
        ----------
        tokens:
            int64 [images, 2, 77], for both encoders. None: the other arguments are passed to the UNet.
        kept:
            [images]: 0 if the caption is dropped, else 1.
        time_ids:
            [images, 6].

        Returns the UNet's output, or text embeddings [images, 77, width] and pooled ones [images, width].
        """
        if tokens is None:
            return self.unet(sample, timestep, *arguments, **options)
        text, summary = encode(tokens.unbind(1), (self.text_encoder, self.text_encoder_2))
        if sample is None:
            return text, summary
        if kept is not None:
            text, summary = text * kept[:, None, None], summary * kept[:, None]
        kind = sample.dtype
        added_cond_kwargs = {"text_embeds": summary.to(kind), "time_ids": time_ids}
        return self.unet(
            sample,
            timestep,
            encoder_hidden_states=text.to(kind),
            added_cond_kwargs=added_cond_kwargs,
            **options,
        )


def with_texts(unet: Any, job: TrainJob, dtype: torch.dtype, *, weights: bool) -> UNetWithTexts:
    """Combine a job's UNet with its text encoders. ``weights``: load the encoders' weights."""
    with collector_paused():
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    encoders = []
    for name, kind in zip(ENCODERS, (CLIPTextModel, CLIPTextModelWithProjection), strict=True):
        folder = job.model_dir / name
        if weights:
            encoders.append(kind.from_pretrained(folder, dtype=dtype))
        else:
            encoders.append(kind(CLIPTextConfig.from_pretrained(folder)).to(dtype))
    return UNetWithTexts(unet, *encoders)


def add_adapters(network: UNetWithTexts, options: dict[str, Any]) -> None:
    """Add LoRA to the queries, keys, values and outputs of both encoders; ``options`` are PEFT's.

    The first encoder's last layer gets none: its output is unused (:func:`launchers.images.texts.encode`).
    """
    from peft import LoraConfig

    for encoder, unused in ((network.text_encoder, 1), (network.text_encoder_2, 0)):
        encoder.requires_grad_(False)
        layers = list(range(encoder.config.num_hidden_layers - unused))
        config = LoraConfig(target_modules=list(TEXT_ADAPTED), layers_to_transform=layers, **options)
        encoder.add_adapter(config)
