"""A UNet with its pipeline's text encoders, if those are trained too; its inputs are captions."""

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
    """Stands where a UNet stands, and takes captions' tokens as well as what was made of them.

    One module of all three, so that what divides models over ranks gathers the weights of each in its turn:
    nothing inside is to be called but by this module's own call.
    """

    def __init__(self, unet: Any, text_encoder: Any, text_encoder_2: Any) -> None:
        super().__init__()
        self.unet, self.text_encoder, self.text_encoder_2 = unet, text_encoder, text_encoder_2

    @property
    def dtype(self) -> torch.dtype:
        """The UNet's."""
        dtype: torch.dtype = self.unet.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The UNet's."""
        device: torch.device = self.unet.device
        return device

    @property
    def config(self) -> Any:
        """The UNet's."""
        return self.unet.config

    @property
    def add_embedding(self) -> Any:
        """The UNet's: diffusers' pipeline looks at its width."""
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
        """Return the UNet's prediction, or, without a sample, the texts of ``tokens``.

        Parameters
        ----------
        tokens:
            int64 [images, 2, 77], of both encoders; without, the UNet's own arguments are given.
        kept:
            [images]: 0 where the caption is left out, 1 elsewhere.
        time_ids:
            [images, 6].

        Returns the UNet's output, or text [images, 77, width] and summary [images, width].
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
    """A job's UNet next to its text encoders, with their weights or with none."""
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

    Not in the first encoder's last layer, whose output is unused (:func:`launchers.images.texts.encode`).
    """
    from peft import LoraConfig

    for encoder, unused in ((network.text_encoder, 1), (network.text_encoder_2, 0)):
        encoder.requires_grad_(False)
        layers = list(range(encoder.config.num_hidden_layers - unused))
        config = LoraConfig(target_modules=list(TEXT_ADAPTED), layers_to_transform=layers, **options)
        encoder.add_adapter(config)
