"""Lays out a trained pipeline as diffusers' folders, without torch: files are linked, not copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from launchers.engines._hf_layout import link

UNET = "unet"
WEIGHTS = "diffusion_pytorch_model.safetensors"
LORA = "pytorch_lora_weights.safetensors"  # diffusers' own name
KOHYA = "kohya_lora_weights.safetensors"


def unet_files(folder: Path) -> list[Path]:
    """The UNet's files that diffusers would load; repositories hold a second copy in half precision."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / WEIGHTS]


def lay_out(output: Path, model_dir: Path, destination: Path) -> None:
    """``destination``/model, the whole pipeline with the UNet of ``output``, and /adapter, LoRA's files.

    Each is there where ``output`` has it.
    """
    for name in ("model", "adapter"):
        shutil.rmtree(destination / name, ignore_errors=True)
    if (output / "model").is_dir():
        _lay_out_model(output / "model" / UNET, model_dir, destination / "model")
    for path in sorted((output / "adapter").glob("*.safetensors")):
        (destination / "adapter").mkdir(parents=True, exist_ok=True)
        link(path, destination / "adapter" / path.name)


def _lay_out_model(unet: Path, model_dir: Path, destination: Path) -> None:
    replaced = {path.name for path in unet_files(model_dir / UNET)}
    for path in sorted(model_dir.rglob("*")):
        inside = path.relative_to(model_dir)
        is_weights = inside.parts[0] == UNET and (path.name in replaced or path.suffix == ".safetensors")
        is_index = path.name == f"{WEIGHTS}.index.json"
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not hidden and not is_weights and not is_index:
            (destination / inside).parent.mkdir(parents=True, exist_ok=True)
            link(path, destination / inside)
    (destination / UNET).mkdir(parents=True, exist_ok=True)
    for path in sorted(unet.iterdir()):
        link(path, destination / UNET / path.name)
    index = model_dir / UNET / f"{WEIGHTS}.index.json"
    if index.is_file() and not (unet / WEIGHTS).is_file():  # merged into the base's own files
        link(index, destination / UNET / index.name)
