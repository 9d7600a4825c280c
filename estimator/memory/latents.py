"""Memory for computing latents and text embeddings: a pipeline's VAE, in fp32, and its text encoders.

The live bytes at the peak of the VAE's encoder were traced: ``AutoencoderKL.encode`` of diffusers 0.42.1
without gradients, on fake tensors, at 512 to 1280 pixels (torch 2.13). The peak is in a residual block of the
first level: five feature maps of the image's size, and the image. The workspace of cuDNN is not included.
"""

from __future__ import annotations

from estimator.models.diffusion import VAE, DiffusionSpec

MOST_AT_ONCE = 8  # images; larger batches are not faster on a GPU
_SHARE = 0.8  # share of the memory next to the networks for images; the rest: work spaces and fragmentation
_FEATURE_MAPS = 5
_FP32 = 4


def network_bytes(model: DiffusionSpec, *, on_gpu: bool) -> int:
    """Return the bytes of the VAE (fp32) and the text encoders (bf16 on GPUs)."""
    text = 2 if on_gpu else _FP32
    return sum(parameters * (_FP32 if name == VAE else text) for name, parameters in model.frozen)


def image_bytes(model: DiffusionSpec) -> int:
    """Return the live bytes while the VAE encodes one image."""
    return _FP32 * model.resolution**2 * (3 + _FEATURE_MAPS * model.vae_width)


def images_at_once(model: DiffusionSpec, available_bytes: int | None) -> int:
    """Return the images to encode at once in ``available_bytes`` (None: unknown), 1 to MOST_AT_ONCE."""
    if available_bytes is None:
        return MOST_AT_ONCE
    image_budget = _SHARE * (available_bytes - network_bytes(model, on_gpu=True))
    return max(1, min(MOST_AT_ONCE, int(image_budget // image_bytes(model))))
