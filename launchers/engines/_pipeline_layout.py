"""Layout of a trained pipeline in diffusers' folders. Files are linked, not copied. Needs no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from launchers.models.hf_layout import link

UNET = "unet"
TEXTS = ("text_encoder", "text_encoder_2")
WEIGHTS = "diffusion_pytorch_model.safetensors"
_TEXT_WEIGHTS = "model.safetensors"  # of a text encoder
LORA = "pytorch_lora_weights.safetensors"  # diffusers' own name
KOHYA = "kohya_lora_weights.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a network that are loaded; a repository may also have them in half precision."""
    weights = WEIGHTS if folder.name == UNET else _TEXT_WEIGHTS
    index = folder / f"{weights}.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / weights]


def lay_out(output: Path, model_dir: Path, destination: Path) -> None:
    """Write ``destination``/model, a pipeline with trained networks, and ``destination``/adapter for LoRA.

    Each is written if ``output`` contains it.
    """
    for name in ("model", "adapter"):
        shutil.rmtree(destination / name, ignore_errors=True)
    if (output / "model").is_dir():
        _lay_out_model(output / "model", model_dir, destination / "model")
    for path in sorted((output / "adapter").glob("*.safetensors")):
        (destination / "adapter").mkdir(parents=True, exist_ok=True)
        link(path, destination / "adapter" / path.name)


def _lay_out_model(trained: Path, model_dir: Path, destination: Path) -> None:
    """Link the base's files, with the weights of the networks in ``trained`` instead of the base's."""
    networks = {folder.name: {path.name for path in folder.iterdir()} for folder in trained.iterdir()}
    for path in sorted(model_dir.rglob("*")):
        relative_path = path.relative_to(model_dir)
        hidden = any(part.startswith(".") for part in relative_path.parts)
        network_files = networks.get(relative_path.parts[0])
        # A merged network has the same files as the base, and so its index; a single file has no index
        is_replaced = network_files is not None and (
            path.suffix == ".safetensors"
            or (path.name.endswith(".index.json") and bool(network_files & {WEIGHTS, _TEXT_WEIGHTS}))
        )
        if path.is_file() and not hidden and not is_replaced:
            (destination / relative_path).parent.mkdir(parents=True, exist_ok=True)
            link(path, destination / relative_path)
    for name, files in networks.items():
        (destination / name).mkdir(parents=True, exist_ok=True)
        for file in sorted(files):
            link(trained / name / file, destination / name / file)
