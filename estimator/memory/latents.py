"""Memory of what computes latents and texts: a pipeline's VAE, in fp32, and its text encoders.

What the VAE's encoder has alive at its peak was traced: ``AutoencoderKL.encode`` of diffusers 0.42.1 without
gradients, on fake tensors, at 512 to 1280 pixels (torch 2.13). It is in a residual block of the first level:
five feature maps of the image's size, and the image. cuDNN's work space is next to it.
"""

from __future__ import annotations

from estimator.models.diffusion import VAE, DiffusionSpec

MOST_AT_ONCE = 8  # images: a GPU that has room for them is busy
_SHARE = 0.8  # share of the memory next to the networks for images; the rest: work spaces and fragmentation
_FEATURE_MAPS = 5
_FP32 = 4


def network_bytes(model: DiffusionSpec, *, on_gpu: bool) -> int:
    """Return the bytes of the VAE and the text encoders: those are in bf16 on GPUs."""
    text = 2 if on_gpu else _FP32
    return sum(parameters * (_FP32 if name == VAE else text) for name, parameters in model.frozen)


def image_bytes(model: DiffusionSpec) -> int:
    """Return the live bytes while the VAE encodes one image."""
    return _FP32 * model.resolution**2 * (3 + _FEATURE_MAPS * model.vae_width)


def images_at_once(model: DiffusionSpec, available_bytes: int | None) -> int:
    """Images that are encoded together in ``available_bytes`` bytes, 1 to MOST_AT_ONCE; None: not known."""
    if available_bytes is None:
        return MOST_AT_ONCE
    image_budget = _SHARE * (available_bytes - network_bytes(model, on_gpu=True))
    return max(1, min(MOST_AT_ONCE, int(image_budget // image_bytes(model))))
