"""Stable Diffusion XL and similar pipelines: a trained UNet, and other frozen networks.

The shapes are those of the model's own config.json files. A pipeline is a ModelSpec, so that it is planned
like a language model: its "layers" are the units of FSDP and checkpointing (residual blocks and transformer
blocks), its "sequence" is the tokens of a caption, and fields that only language models use are 1 or 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from estimator.errors import UserError
from estimator.models import unet as counts
from estimator.models.clip import TextEncoderShape
from estimator.models.spec import ModelSpec
from estimator.models.unet import ADAPTED, TEXT_TOKENS, UNetShape
from estimator.untrusted import read_json_object

HF_ID = "stabilityai/stable-diffusion-xl-base-1.0"
SOURCE = f"https://huggingface.co/{HF_ID}, config.json of each component"
FAMILY = "stable-diffusion-xl"
TINY = "tiny-sdxl"
VAE_SCALE = 8  # pixels of one latent position, in each direction
VAE = "VAE"  # its name among the frozen networks
LARGEST_IMAGE = 2048  # maximum side of an image, in pixels
_LATENT_CHANNELS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSpec(ModelSpec):
    """A pipeline of several networks; the UNet is trained.

    ``resolution`` and the fields after ``vae_width`` describe its training.
    """

    unet: UNetShape
    texts: tuple[TextEncoderShape, ...]
    vae_parameters: int
    resolution: int  # side of a square image in pixels; by default the one that it was published for
    vae_width: int = 128  # channels of the VAE's first level
    trains_texts: bool = False  # also train LoRA adapters on the text encoders
    keeps_average: bool = False  # keep a moving average of the trained weights, in fp32
    loads_encoders: bool = False  # keep VAE and text encoders in memory instead of precomputing latents

    def __post_init__(self) -> None:
        """Skip the checks of a transformer: a field without meaning for a UNet is 1 or 0."""

    @property
    def frozen(self) -> tuple[tuple[str, int], ...]:
        """(name, parameters) of the networks next to the UNet."""
        return (*((encoder.name, encoder.parameters) for encoder in self.texts), (VAE, self.vae_parameters))

    @property
    def components(self) -> tuple[tuple[str, int], ...]:
        """(name, parameters) of all networks, the trained one first."""
        return (("UNet", self.parameters), *self.frozen)

    @property
    def parameters(self) -> int:
        """Parameters of the network that training changes."""
        return self.unet.parameters

    @property
    def stored_parameters(self) -> int:
        """Parameters of all components."""
        return self.parameters + sum(parameters for _, parameters in self.frozen)

    @property
    def active_parameters(self) -> int:
        """Parameters of the UNet: a forward pass uses all of them."""
        return self.parameters

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Name of each linear layer of the widest block -> (out, in)."""
        c, text = self.unet.channels[-1], self.unet.text_width
        shapes = {"to_q": (c, c), "to_k": (c, text), "to_v": (c, text), "to_out.0": (c, c)}
        return shapes | {"ff.net.0.proj": (8 * c, c), "ff.net.2": (c, 4 * c)}

    @property
    def projections(self) -> tuple[str, ...]:
        """Layers that LoRA adapts: both attentions of every block."""
        return ADAPTED

    @property
    def all_linear(self) -> tuple[str, ...]:
        """Layers that LoRA adapts: both attentions of every block."""
        return ADAPTED

    def describe_length(self, seq_len: int) -> str:  # noqa: ARG002 - the tokens of a caption
        """Format the size of an image."""
        return f"{self.resolution} x {self.resolution} pixels"

    @property
    def layer_parameters(self) -> int:
        """Mean parameters of a block, residual or transformer."""
        return (self.parameters - self.unet.outer_parameters) // self.unet.units

    def check_lora_targets(self, targets: Iterable[str]) -> None:
        """Accept any targets: adapters are on both attentions of every block."""

    def lora_parameters(
        self,
        rank: int,
        targets: Iterable[str],  # noqa: ARG002 - only language models use these
        *,
        family_code: bool = False,  # noqa: ARG002
        magnitudes: bool = False,  # noqa: ARG002
    ) -> int:
        """Count the weights of adapters on both attentions of every block, and on trained text encoders."""
        texts = sum(encoder.lora_parameters(rank) for encoder in self.texts) if self.trains_texts else 0
        return self.unet.lora_parameters(rank) + texts

    @property
    def latent_side(self) -> int:
        """Side of a square image's latent, in positions."""
        return self.resolution // VAE_SCALE


def check_resolution(side: int) -> None:
    """Raise UserError for a side of images, in pixels, that cannot be trained."""
    if side < VAE_SCALE or side % VAE_SCALE or side > LARGEST_IMAGE:
        raise UserError(
            f"{side} pixels per side is invalid: it must be a multiple of {VAE_SCALE}, from {VAE_SCALE} to "
            f"{LARGEST_IMAGE}.",
            f"Give {min(max(round(side / 64), 1) * 64, LARGEST_IMAGE)}.",
        )


def spec_of(
    name: str,
    unet: UNetShape,
    *,
    texts: tuple[TextEncoderShape, ...],
    vae_parameters: int,
    resolution: int,
    vae_width: int = 128,
    hf_id: str | None = None,
    source: str = "",
) -> DiffusionSpec:
    """Return the pipeline with that UNet."""
    width = unet.channels[-1]
    return DiffusionSpec(
        name=name,
        family=FAMILY,
        layers=unet.units,
        hidden=width,
        heads=1,
        kv_heads=1,
        head_dim=width,
        ffn=4 * width,
        vocab=1,
        tied_embeddings=True,
        max_seq_len=TEXT_TOKENS,
        causal=False,
        hf_id=hf_id,
        source=source,
        unet=unet,
        texts=texts,
        vae_parameters=vae_parameters,
        resolution=resolution,
        vae_width=vae_width,
    )


# ---------------------------------------------------------------------------------------------------------
# Parameters of the networks next to the UNet


def vae_parameters(channels: tuple[int, ...] = (128, 256, 512, 512), resnets: int = 2) -> int:
    """Count the parameters of the VAE: ``resnets`` blocks per encoder level, one more per decoder level."""
    latent, top = _LATENT_CHANNELS, channels[-1]
    middle = 2 * counts.resnet(top, top) + counts.norm(top) + 4 * counts.linear(top, top)
    sampling = sum(counts.conv(c, c) for c in channels[:-1])  # downwards
    encoder = counts.conv(3, channels[0]) + middle + counts.norm(top) + counts.conv(top, 2 * latent)
    encoder += _levels(channels, resnets) + sampling + counts.conv(2 * latent, 2 * latent, 1)
    decoder = counts.conv(latent, latent, 1) + counts.conv(latent, top) + middle
    decoder += counts.norm(channels[0]) + counts.conv(channels[0], 3)
    decoder += _levels(channels[::-1], resnets + 1) + sum(counts.conv(c, c) for c in channels[:0:-1])
    return encoder + decoder


def _levels(channels: tuple[int, ...], resnets: int) -> int:
    """Count the parameters of residual blocks of all levels; the first of a level changes the channels."""
    in_channels = (channels[0], *channels[:-1])
    return sum(
        counts.resnet(a, b) + (resnets - 1) * counts.resnet(b, b)
        for a, b in zip(in_channels, channels, strict=True)
    )


# ---------------------------------------------------------------------------------------------------------
# A pipeline in a folder


def read_directory(folder: Path, name: str) -> DiffusionSpec:
    """Return the shape of a pipeline in diffusers' layout. Raises UserError where it is of another kind."""
    try:
        kind = read_json_object(folder / "model_index.json")["_class_name"]
        unet = UNetShape.of_config(read_json_object(folder / "unet" / "config.json"))
        texts = tuple(
            TextEncoderShape.of_config(
                read_json_object(folder / encoder / "config.json"),
                encoder.replace("_", " "),
                projects=encoder[-1] == "2",
            )
            for encoder in ("text_encoder", "text_encoder_2")
        )
        vae = read_json_object(folder / "vae" / "config.json")
        channels, resnets = tuple(vae["block_out_channels"]), vae["layers_per_block"]
        size = int(str(read_json_object(folder / "unet" / "config.json")["sample_size"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} is not a diffusion pipeline like Stable Diffusion XL: {error}.",
            "Give a folder that diffusers' StableDiffusionXLPipeline has saved.",
        ) from None
    if kind != "StableDiffusionXLPipeline":
        raise UserError(
            f"{folder} is a {kind}.", "Of diffusion pipelines StableDiffusionXLPipeline is trained here."
        )
    return spec_of(
        name,
        unet,
        texts=texts,
        vae_parameters=vae_parameters(channels, resnets),
        resolution=size * VAE_SCALE,
        vae_width=channels[0],
        source=str(folder),
    )


STABLE_DIFFUSION_XL = spec_of(
    "stable-diffusion-xl",
    UNetShape(channels=(320, 640, 1280), transformer_layers=(0, 2, 10)),  # unet/config.json
    texts=(  # text_encoder/config.json, text_encoder_2/config.json
        TextEncoderShape(
            name="text encoder (CLIP ViT-L)", width=768, layers=12, inner=3072, heads=12, quick=True
        ),
        TextEncoderShape(
            name="text encoder 2 (OpenCLIP bigG)",
            width=1280,
            layers=32,
            inner=5120,
            heads=20,
            projection=1280,
        ),
    ),
    vae_parameters=vae_parameters(),  # vae/config.json: channels 128, 256, 512, 512
    resolution=1024,
    hf_id=HF_ID,
    source=SOURCE,
)
TINY_SDXL = spec_of(  # launchers/models/tiny_sdxl.py makes it
    TINY,
    UNetShape(
        channels=(32, 64),
        transformer_layers=(0, 2),
        resnets=1,
        head_dim=16,
        text_width=64,
        pooled_width=32,
        time_width=8,
    ),
    texts=(
        TextEncoderShape(name="text encoder", width=32, layers=3, inner=64, heads=4, vocabulary=594),
        TextEncoderShape(
            name="text encoder 2", width=32, layers=3, inner=64, heads=4, projection=32, vocabulary=594
        ),
    ),
    vae_parameters=vae_parameters((16, 16, 32, 32), 1),
    resolution=64,
    vae_width=16,
    source="launchers/models/tiny_sdxl.py",
)
_NAMES = ("stable-diffusion-xl", "sdxl", "stable-diffusion-xl-base-1.0", HF_ID.lower())
MODELS = dict.fromkeys(_NAMES, STABLE_DIFFUSION_XL) | {TINY: TINY_SDXL}
