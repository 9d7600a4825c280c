"""Pictures that a pipeline makes of captions, small enough for a card."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.imports import collector_paused

if TYPE_CHECKING:
    import torch

INFERENCE_STEPS = 25
SHOWN_PIXELS = 256  # of the longer side of a picture on a card


def decoder(model_dir: Path, device: torch.device) -> Any:
    """A pipeline's VAE in fp32, as half precision overflows in it.

    It decodes large images in tiles, as it may have little room beside what is trained.
    """
    with collector_paused():
        from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(model_dir / "vae").to(device).eval()
    vae.enable_tiling()
    return vae


def draw(
    unet: Any,
    vae: Any,
    model_dir: Path,
    *,
    text: torch.Tensor,
    summary: torch.Tensor,
    size: tuple[int, int],
    seed: int,
) -> Any:
    """The picture, as PIL has it, that a UNet makes of a caption whose texts are computed.

    Parameters
    ----------
    text, summary:
        [77, width] and [width], as launchers.latents has them.
    size:
        Height and width in pixels.
    """
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    place = {"device": vae.device, "dtype": unet.dtype}
    pipeline = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        unet=unet,
        scheduler=EulerDiscreteScheduler.from_pretrained(model_dir / "scheduler"),
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    height, width = size
    latents = pipeline(
        prompt_embeds=text[None].to(**place),
        pooled_prompt_embeds=summary[None].to(**place),
        height=height,
        width=width,
        num_inference_steps=INFERENCE_STEPS,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images
    pixels = vae.decode(latents.float() / vae.config.scaling_factor).sample
    return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]


def encoded(image: Any) -> str:
    """An image of PIL's as a PNG file in base64, made smaller where it is large."""
    image.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
