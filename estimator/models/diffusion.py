"""Stable Diffusion XL: parameters of its four networks, and what its UNet keeps for the backward pass.

The shapes are those of the model's own config.json files; the structure follows diffusers 0.42.1
(models/unets/unet_2d_blocks.py, models/attention.py, models/autoencoders/vae.py) and transformers' CLIP.
c are channels, n positions of a feature map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from estimator.errors import UserError

HF_ID = "stabilityai/stable-diffusion-xl-base-1.0"
SOURCE = f"https://huggingface.co/{HF_ID}, config.json of each component"
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_VAE_SCALE = 8  # pixels of one latent position, in each direction

# unet/config.json
_CHANNELS = (320, 640, 1280)
_TRANSFORMER_LAYERS = (0, 2, 10)  # in each transformer of a level; the first level has none
_RESNETS = 2  # of each level on the way down; one more on the way up
_LATENT_CHANNELS = 4
_HEAD_DIM = 64
_TEXT_WIDTH, _TEXT_TOKENS = 2048, 77  # both text encoders' outputs side by side; CLIP's length
_TIME, _ADDED = 1280, 2816  # time embedding; pooled text and six numbers of 256 each
_GROUPS = 32  # of a group norm


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSpec:
    """A pipeline of several networks, of which training changes the first."""

    name: str
    hf_id: str
    components: tuple[tuple[str, int], ...]  # (name, parameters)
    source: str

    @property
    def parameters(self) -> int:
        """Parameters of all components."""
        return sum(parameters for _, parameters in self.components)

    @property
    def trained_parameters(self) -> int:
        """Parameters of the network that training changes."""
        return self.components[0][1]


# ---------------------------------------------------------------------------------------------------------
# The UNet's layers, which both the parameters and the activations are counted from


@dataclass(frozen=True, slots=True)
class _Part:
    kind: Literal["resnet", "transformer", "down", "up"]
    level: int  # of the feature map that it works on; 0 is the largest
    into: int
    out: int
    layers: int = 0


def _unet_parts() -> Iterator[_Part]:
    """The UNet's blocks in the order of the forward pass, without what comes before and after them."""
    last = len(_CHANNELS) - 1
    channels, skips = _CHANNELS[0], [_CHANNELS[0]]
    for level, out in enumerate(_CHANNELS):
        for _ in range(_RESNETS):
            yield from _pair(level, channels, out)
            channels = out
            skips.append(out)
        if level < last:
            yield _Part("down", level, out, out)
            skips.append(out)
    yield from _pair(last, channels, channels)
    yield _Part("resnet", last, channels, channels)
    for level in reversed(range(len(_CHANNELS))):
        out = _CHANNELS[level]
        for _ in range(_RESNETS + 1):  # each takes one feature map of the way down beside its input
            yield from _pair(level, channels + skips.pop(), out)
            channels = out
        if level:
            yield _Part("up", level - 1, out, out)


def _pair(level: int, into: int, out: int) -> Iterator[_Part]:
    yield _Part("resnet", level, into, out)
    if _TRANSFORMER_LAYERS[level]:
        yield _Part("transformer", level, out, out, _TRANSFORMER_LAYERS[level])


# ---------------------------------------------------------------------------------------------------------
# Parameters


def unet_parameters() -> int:
    """Parameters of Stable Diffusion XL's UNet."""
    first = _CHANNELS[0]
    total = _conv(_LATENT_CHANNELS, first) + _conv(first, _LATENT_CHANNELS) + _norm(first)
    for width in (first, _ADDED):  # time; pooled text and sizes
        total += _linear(width, _TIME) + _linear(_TIME, _TIME)
    for part in _unet_parts():
        if part.kind == "resnet":
            total += _resnet(part.into, part.out) + _linear(_TIME, part.out)
        elif part.kind == "transformer":
            total += _transformer(part.out, part.layers)
        else:
            total += _conv(part.into, part.out)
    return total


def _transformer(c: int, layers: int) -> int:
    """Norm, a linear layer before and after, and blocks of self-attention, cross-attention and GEGLU."""
    attention = 4 * c * c + c + 2 * c * c + 2 * _TEXT_WIDTH * c + c
    feed_forward = _linear(c, 8 * c) + _linear(4 * c, c)
    return _norm(c) + 2 * _linear(c, c) + layers * (3 * _norm(c) + attention + feed_forward)


def _resnet(into: int, out: int) -> int:
    shortcut = _conv(into, out, 1) if into != out else 0
    return _norm(into) + _conv(into, out) + _norm(out) + _conv(out, out) + shortcut


def _conv(into: int, out: int, size: int = 3) -> int:
    return into * out * size * size + out


def _linear(into: int, out: int) -> int:
    return _conv(into, out, 1)


def _norm(c: int) -> int:
    return 2 * c


def clip_parameters(*, width: int, layers: int, projection: int = 0) -> int:
    """Parameters of a CLIP text encoder: 49,408 tokens, 77 positions, MLP of four widths, biases all over."""
    block = 4 * _linear(width, width) + _linear(width, 4 * width) + _linear(4 * width, width)
    embeddings = (49_408 + _TEXT_TOKENS) * width
    return embeddings + layers * (block + 2 * _norm(width)) + _norm(width) + projection * width


def vae_parameters() -> int:
    """Parameters of the VAE.

    vae/config.json: channels 128, 256, 512, 512; two residual blocks a level, three in the decoder.
    """
    channels, latent = (128, 256, 512, 512), _LATENT_CHANNELS
    top = channels[-1]
    middle = 2 * _resnet(top, top) + _norm(top) + 4 * _linear(top, top)
    sampling = sum(_conv(c, c) for c in channels[:-1])  # downwards
    encoder = _conv(3, channels[0]) + middle + _norm(top) + _conv(top, 2 * latent)
    encoder += _levels(channels, 2) + sampling + _conv(2 * latent, 2 * latent, 1)
    decoder = (
        _conv(latent, latent, 1) + _conv(latent, top) + middle + _norm(channels[0]) + _conv(channels[0], 3)
    )
    decoder += _levels(channels[::-1], 3) + sum(_conv(c, c) for c in channels[:0:-1])
    return encoder + decoder


def _levels(channels: tuple[int, ...], resnets: int) -> int:
    """Residual blocks of all levels; the first of a level changes the channels."""
    before = (channels[0], *channels[:-1])
    return sum(_resnet(a, b) + (resnets - 1) * _resnet(b, b) for a, b in zip(before, channels, strict=True))


# ---------------------------------------------------------------------------------------------------------
# Activations


def unet_activation_bytes(width: int, height: int, batch: int, dtype: str) -> int:
    """Bytes that the UNet saves for its backward pass, all its weights trained and without checkpointing.

    Counted from the feature maps that each layer keeps, with flash attention and weights and activations of
    one type; mixed precision by autocast keeps more. Equal to a trace of diffusers 0.42.1's
    UNet2DConditionModel under FakeTensorMode (torch 2.13): tests/estimator/models/test_diffusion.py. Raises
    UserError for a size, batch or type that can't be.

    Parameters
    ----------
    width, height:
        Of the images, in pixels; multiples of 8.
    batch:
        Images of one forward pass.
    dtype:
        fp32, bf16 or fp16.
    """
    if dtype not in DTYPE_BYTES:
        raise UserError(f"dtype = {dtype!r} is not known.", f"Choose one of {', '.join(DTYPE_BYTES)}.")
    for name, value in (("width", width), ("height", height)):
        if value < _VAE_SCALE or value % _VAE_SCALE:
            raise UserError(f"{name} = {value!r} must be a multiple of {_VAE_SCALE} pixels.")
    if batch < 1:
        raise UserError(f"batch = {batch!r} must be a whole number above 0.")
    positions = _positions(width // _VAE_SCALE, height // _VAE_SCALE)
    size, per_image = DTYPE_BYTES[dtype], _kept_outside(positions[0], DTYPE_BYTES[dtype])
    for part in _unet_parts():
        n = positions[part.level]
        if part.kind == "resnet":
            per_image += size * _resnet_keeps(part.into, part.out, n)
        elif part.kind == "transformer":
            per_image += _transformer_keeps(part.out, part.layers, n, size)
        else:
            per_image += size * part.into * n
    return batch * per_image


def _positions(width: int, height: int) -> list[int]:
    """Positions of the feature map of each level; a step down is a convolution of stride 2."""
    counts = []
    for _ in _CHANNELS:
        counts.append(width * height)
        width, height = (width + 1) // 2, (height + 1) // 2
    return counts


def _kept_outside(n: int, size: int) -> int:
    """The latent, both embeddings' layers, the text, and norm, SiLU and convolution at the end."""
    embeddings = _CHANNELS[0] + 2 * _TIME + _ADDED + 2 * _TIME + _TIME
    text = _TEXT_TOKENS * _TEXT_WIDTH
    return size * (_LATENT_CHANNELS * n + embeddings + text + 3 * _CHANNELS[0] * n + 2 * _GROUPS)


def _resnet_keeps(into: int, out: int, n: int) -> int:
    """Inputs of two norms, SiLUs and convolutions; the norms' statistics; the time embedding's SiLU."""
    return 3 * (into + out) * n + 2 * 2 * _GROUPS + _TIME


def _transformer_keeps(c: int, layers: int, n: int, size: int) -> int:
    """28cn a block, 3cn around them.

    In a block: three norms' inputs and outputs (6), self-attention's queries, keys, values and result (4),
    cross-attention's queries and result (2), GEGLU's two halves, its GELU, and their product (8 + 4 + 4).
    """
    block = 28 * c * n + 3 * 2 * n + 2 * c * _TEXT_TOKENS
    log_sum_exp = 4 * 2 * (c // _HEAD_DIM) * n  # fp32, of both attentions
    return size * (3 * c * n + 2 * _GROUPS) + layers * (size * block + log_sum_exp)


STABLE_DIFFUSION_XL = DiffusionSpec(
    name="stable-diffusion-xl",
    hf_id=HF_ID,
    components=(
        ("UNet", unet_parameters()),
        ("text encoder (CLIP ViT-L)", clip_parameters(width=768, layers=12)),
        ("text encoder 2 (OpenCLIP bigG)", clip_parameters(width=1280, layers=32, projection=1280)),
        ("VAE", vae_parameters()),
    ),
    source=SOURCE,
)
_NAMES = ("stable-diffusion-xl", "sdxl", "stable-diffusion-xl-base-1.0", HF_ID.lower())
MODELS = dict.fromkeys(_NAMES, STABLE_DIFFUSION_XL)
