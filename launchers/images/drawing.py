"""Sample images that a diffusion pipeline generates from captions, downscaled for the card."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.base.imports import collector_paused

if TYPE_CHECKING:
    import torch

INFERENCE_STEPS = 25
SHOWN_PIXELS = 256  # longer side of an image on a card


def decoder(model_dir: Path, device: torch.device) -> Any:
    """Load a pipeline's VAE in fp32, because half precision overflows in it.

    Large images are decoded in tiles, as little memory may be free during training.
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
    """Generate an image (PIL) with a UNet from a caption whose text embeddings are precomputed.

    Parameters
    ----------
    text, summary:
        Text embeddings [77, width] and pooled embedding [width], see launchers.precompute.latents.
    size:
        Height and width in pixels.
    """
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    options = {"device": vae.device, "dtype": unet.dtype}
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
        prompt_embeds=text[None].to(**options),
        pooled_prompt_embeds=summary[None].to(**options),
        height=height,
        width=width,
        num_inference_steps=INFERENCE_STEPS,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images
    pixels = vae.decode(latents.float() / vae.config.scaling_factor).sample
    return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]


def encoded(image: Any) -> str:
    """Encode a PIL image as a base64 PNG file, downscaled to ``SHOWN_PIXELS``."""
    image.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
