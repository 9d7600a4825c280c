"""CLIP score: how well images match their captions, as 100 times the cosine of their embeddings.

Same as torchmetrics' CLIPScore, after Hessel et al. 2021 (arXiv:2104.08718, equation 1, which has a factor of
2.5 instead of 100); negative cosines count as 0. Compare only scores of the same CLIP model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.untrusted import list_contained_files, read_json_object
from launchers.base.imports import collector_paused


def check(model: str) -> None:
    """Raise UserError unless ``model`` is a folder with a CLIP model or could be a Hugging Face id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        list_contained_files(folder)
        config = folder / "config.json"
        kind = read_json_object(config).get("model_type") if config.is_file() else None
        if kind != "clip":
            raise UserError(
                f"--images-clip-model {model}: the folder has no config.json of a CLIP model.",
                "Use a folder saved by transformers' CLIPModel and CLIPProcessor, or a Hugging Face id.",
            )
    elif model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UserError(
            f"--images-clip-model {model}: no such folder.",
            "Use an existing folder, or a Hugging Face id such as openai/clip-vit-large-patch14.",
        )


def score(model: str, images: Sequence[Any], captions: Sequence[str], device: str) -> float:
    """Return the mean score over images (PIL) and their captions."""
    with collector_paused():
        import torch
        from transformers import CLIPModel, CLIPProcessor

    source = str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
    clip: Any = CLIPModel.from_pretrained(source, trust_remote_code=False).to(device).eval()
    processor = CLIPProcessor.from_pretrained(source, trust_remote_code=False)
    inputs = processor(
        text=list(captions), images=list(images), return_tensors="pt", padding=True, truncation=True
    )
    with torch.inference_mode():
        output = clip(**inputs.to(device))
        cosines = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
    return float(100 * cosines.clamp(min=0).mean())
