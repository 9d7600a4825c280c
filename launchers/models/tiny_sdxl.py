"""tiny-sdxl: a generated pipeline like Stable Diffusion XL's, with 1.4 million random parameters.

It can be used like the real one: layout of diffusers, two text encoders, safetensors, latents of an eighth of
the image's size, time ids. Its tokenizer has one token per word of the drawn-shapes dataset, and bytes for
other text.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from estimator.errors import UserError
from launchers.base.imports import imported_quietly
from launchers.base.workdir import make_folder
from launchers.dataset import drawn_shapes
from launchers.models import causal

if TYPE_CHECKING:
    import torch

NAME = "tiny-sdxl"
SCALING_FACTOR = 0.13025  # in Stable Diffusion XL's vae/config.json
_HIDDEN = 32  # width of each text encoder
_TIME_DIM = 8  # width of each of the six time ids

CONFIG: dict[str, Any] = {  # configuration of the UNet
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": _TIME_DIM,
    "attention_head_dim": [2, 4],  # diffusers uses this name for the number of heads
    "block_out_channels": [32, 64],
    "center_input_sample": False,
    "cross_attention_dim": 2 * _HIDDEN,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "in_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": _HIDDEN + 6 * _TIME_DIM,
    "sample_size": 8,
    "transformer_layers_per_block": [1, 2],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
_VAE: dict[str, Any] = {
    "block_out_channels": [16, 16, 32, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "force_upcast": False,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "out_channels": 3,
    "sample_size": 64,
    "scaling_factor": SCALING_FACTOR,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
_TEXT: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "max_position_embeddings": 77,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "projection_dim": _HIDDEN,
}
# From Stable Diffusion XL's scheduler/scheduler_config.json
_SCHEDULER: dict[str, Any] = {
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
_BOS, _EOS = "<|startoftext|>", "<|endoftext|>"
_SAMPLE_IMAGES = 96  # number of images that determine the scale of the latents
_EMBEDDING_SCALE = 50.0  # factor on CLIP's initial standard deviation of 0.02
_LOG_VARIANCE = -12.0  # negligible for latents with a standard deviation of 1 / SCALING_FACTOR


def make(folder: Path, seed: int = 0) -> Path:
    """Generate the pipeline in ``folder`` atomically and return the folder; an existing one is not changed.

    The same seed and package versions give the same bytes on one machine. It takes a few seconds. Raises
    UserError if diffusers is not installed.
    """

    def write(path: Path) -> None:
        with imported_quietly():
            _write(path, seed)

    return make_folder(folder, write, lambda path: (path / "model_index.json").exists())


def _write(folder: Path, seed: int) -> None:
    try:
        import torch
        from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline
        from diffusers import UNet2DConditionModel as UNet
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
    except ImportError:
        raise UserError(
            f"{NAME} needs the `diffusers` package, which is not installed.",
            "With Python 3.11 or newer: pip install 'metaflow-finetune[diffusion]'",
        ) from None
    tokenizer = build_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = CLIPTextConfig(**_TEXT, **ids, pad_token_id=tokenizer.pad_token_id, vocab_size=len(tokenizer))
    with torch.random.fork_rng(devices=[]):  # keeps torch's global random state
        torch.manual_seed(seed)
        vae = AutoencoderKL(**_VAE).eval()
        parts = {
            "unet": UNet(**CONFIG),
            "vae": vae,
            "text_encoder": CLIPTextModel(text),
            "text_encoder_2": CLIPTextModelWithProjection(text),
        }
    _scale_latents(vae)
    # Larger embeddings, because random layers attenuate them until prompts are indistinguishable
    with torch.no_grad():
        for name in ("text_encoder", "text_encoder_2"):
            parts[name].get_input_embeddings().weight *= _EMBEDDING_SCALE
    scheduler = EulerDiscreteScheduler(**_SCHEDULER)
    pipeline = StableDiffusionXLPipeline(
        **parts, tokenizer=tokenizer, tokenizer_2=tokenizer, scheduler=scheduler
    )
    with causal.without_progress_bars():
        pipeline.save_pretrained(folder, safe_serialization=True)


def _scale_latents(vae: Any) -> None:
    """Scale the VAE so that latents of drawn shapes, times the scaling factor, are standardized by channel.

    Random layers attenuate an image, by a different factor in each channel.
    """
    import torch

    with torch.no_grad():
        latents = vae.encode(_images()).latent_dist.mean
        scale = 1 / (SCALING_FACTOR * latents.std(dim=(0, 2, 3)))
        last, channels = vae.quant_conv, latents.shape[1]
        last.weight[:channels] *= scale[:, None, None, None]
        last.bias[:channels] = (last.bias[:channels] - latents.mean(dim=(0, 2, 3))) * scale
        last.weight[channels:] = 0.0
        last.bias[channels:] = _LOG_VARIANCE


def _images() -> torch.Tensor:
    """Return drawn shapes, scaled to 64 x 64 pixels with values from -1 to 1: [images, 3, 64, 64]."""
    import torch
    from PIL import Image

    files = (io.BytesIO(image) for _, image in drawn_shapes.draw_images(_SAMPLE_IMAGES))
    pixels = [np.asarray(Image.open(file).resize((64, 64)), dtype=np.float32) for file in files]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1


def build_tokenizer() -> Any:
    """Build a CLIP tokenizer with a small vocabulary: all bytes, and words and word parts of the captions."""
    from tokenizers import (  # type: ignore[import-untyped,unused-ignore]
        Tokenizer,
        models,
        pre_tokenizers,
        trainers,
    )
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learned.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=10_000, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    captions = [caption for caption, _ in drawn_shapes.draw_images(drawn_shapes.COUNT)]
    learned.train_from_iterator(captions, trainer)
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *map("".join, merges), _BOS, _EOS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocabulary, merges, model_max_length=77)
