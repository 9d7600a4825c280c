"""Train Stable Diffusion XL with LoRA on one GPU, and compare memory and speed with the plan.

    python -m benchmarks.on_gpu.images [--steps 20]
    python -m benchmarks.on_gpu.images --tiny       # tiny-sdxl on the CPU
    python -m benchmarks.on_gpu.images --dry-run    # the command, on any machine

Nothing is downloaded: UNet, VAE and text encoders have the sizes of stable-diffusion-xl-base-1.0 and random
weights (7 GB in bf16), images are drawn. The run is ``python -m launchers`` as a user starts it, with
precomputed latents and without evaluation. The result is sdxl_DEVICE.json in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from estimator.errors import UserError
from launchers.base import workdir
from launchers.base.workdir import make_folder
from launchers.dataset import drawn_shapes
from launchers.models import tiny_sdxl

RESULTS = Path(__file__).parents[1] / "results"
ROOT = Path(__file__).parents[2]
NAME = "sdxl"
IMAGES = 40
SMALLEST_SHARE = 0.5  # of the resolution; smaller images are rejected
# unet/config.json, vae/config.json and text_encoder*/config.json of stabilityai/stable-diffusion-xl-base-1.0
UNET: dict[str, Any] = {
    **tiny_sdxl.CONFIG,
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}
VAE: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "latent_channels": 4,
    "layers_per_block": 2,
    "sample_size": 1024,
    "scaling_factor": tiny_sdxl.SCALING_FACTOR,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
TEXTS: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
    },
    "text_encoder_2": {
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "projection_dim": 1280,
    },
}


def make(folder: Path, device: str) -> Path:
    """Generate a pipeline of SDXL's size with random weights in bf16; ``device`` draws them."""

    def write(path: Path) -> None:
        import torch
        from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline
        from diffusers import UNet2DConditionModel as UNet
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

        tokenizer = tiny_sdxl.build_tokenizer()
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        ids |= {"pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
        texts = {name: CLIPTextConfig(**values, **ids) for name, values in TEXTS.items()}
        with torch.device(device):
            parts: dict[str, Any] = {
                "unet": UNet(**UNET),
                "vae": AutoencoderKL(**VAE),
                "text_encoder": CLIPTextModel(texts["text_encoder"]),
                "text_encoder_2": CLIPTextModelWithProjection(texts["text_encoder_2"]),
            }
        parts = {name: part.to(torch.bfloat16) for name, part in parts.items()}
        scheduler = EulerDiscreteScheduler(prediction_type="epsilon", steps_offset=1)
        pipeline = StableDiffusionXLPipeline(
            **parts, tokenizer=tokenizer, tokenizer_2=tokenizer, scheduler=scheduler
        )
        pipeline.save_pretrained(path, safe_serialization=True)

    return make_folder(folder, write, lambda path: (path / "model_index.json").exists())


def draw(folder: Path, side: int) -> Path:
    """Draw images that are large enough for the resolution ``side``."""
    from PIL import Image

    drawn_shapes.write(folder, IMAGES)
    for file in folder.rglob("*.png"):
        image = Image.open(file)
        if min(image.size) < side * SMALLEST_SHARE:
            image.resize((side, side)).save(file)
    return folder


def command(folder: Path, model: Path, options: argparse.Namespace) -> list[str]:
    """Return the command of the run."""
    values = {
        "model": model,
        "method": "lora",
        "engine": "fsdp2",
        "dataset": folder / "images",
        "task": "text-to-image",
        "images.resolution": 64 if options.tiny else 1024,
        "max_steps": options.steps,
        "global_batch_size": 4,
        "checkpoint_every": options.steps + 1,
        "evaluation.fraction": 0,
        "evaluation.generations": 0,
        "resources.device": "cpu" if options.tiny else "cuda",
        "resources.nodes": 1,
        "resources.gpus": 1,
        "output_dir": folder / "out",
    }
    changes = [each for name, value in values.items() for each in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "launchers", "--no-calibration", *changes]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make model and images, and run. Raises UserError if the run fails or does not end in time."""
    began = time.monotonic()
    model = tiny_sdxl.make(folder / NAME) if options.tiny else make(folder / NAME, "cuda")
    draw(folder / "images", 64 if options.tiny else 1024)
    made_s = time.monotonic() - began
    log = options.out / f"{NAME}_log.txt"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command(folder, model, options),
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=60 * options.minutes - made_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"The run did not end in {options.minutes:g} minutes.", f"See {log}.") from None
    if done.returncode:
        raise UserError(f"The run ended with status {done.returncode}.", f"See {log}.")
    figures = json.loads((folder / "out" / "metrics.json").read_text())
    return {
        "seconds_to_make_the_model": round(made_s, 1),
        "seconds": round(time.monotonic() - began, 1),
        **{name: figures[name] for name in ("predicted", "measured")},
        "losses": [step["loss"] for step in figures["steps"]],
    }


def main() -> None:
    """Run ``python -m benchmarks.on_gpu.images``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu.images",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of 4 images (default: 20)")
    parser.add_argument("--minutes", type=float, default=6.0, help="time limit of the whole (default: 6)")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny-sdxl on the CPU")
    parser.add_argument("--dry-run", action="store_true", help="print the command, on any machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    machine = describe()
    if options.dry_run:
        print(shlex.join(command(Path("FOLDER"), Path("FOLDER") / NAME, options)))
        return
    try:
        if not (options.tiny or machine["gpus"]):
            raise UserError("No NVIDIA GPU is found by its driver (NVML).", "Use --tiny or --dry-run.")
        options.out.mkdir(parents=True, exist_ok=True)
        with workdir.work_folder("on_gpu", NAME, "0") as folder:
            figures = measure(folder, options)
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    file = options.out / f"{NAME}_{'cpu' if options.tiny else 'cuda'}.json"
    file.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n")
    print(json.dumps({name: figures[name] for name in ("seconds", "predicted", "measured")}, indent=1))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
