"""How well pictures fit their captions, by a CLIP model: 100 times the cosine of their embeddings.

As torchmetrics' CLIPScore counts it, after Hessel et al. 2021 (arXiv:2104.08718, equation 1, whose factor is
2.5); what is below 0 counts as 0. Compare only scores of one CLIP model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.errors import Change, UserError
from launchers.imports import collector_paused

SETTING = "images.clip_model"


def check(model: str) -> None:
    """Raise UserError for what is neither a folder of a CLIP model nor an id that may be one's."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        config = folder / "config.json"
        kind = json.loads(config.read_text()).get("model_type") if config.is_file() else None
        if kind != "clip":
            raise UserError(
                (Change(SETTING, model), ": no CLIP model lies there, with its config.json."),
                "Give a folder that transformers' CLIPModel and CLIPProcessor have saved, or an id.",
            )
    elif model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UserError(
            (Change(SETTING, model), ": there is no such folder."),
            "Give a folder, or a Hugging Face id such as openai/clip-vit-large-patch14.",
        )


def score(model: str, images: Sequence[Any], captions: Sequence[str], device: str) -> float:
    """The mean over images (as PIL has them) and their captions."""
    with collector_paused():
        import torch
        from transformers import CLIPModel, CLIPProcessor

    source = str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
    clip: Any = CLIPModel.from_pretrained(source).to(device).eval()
    processor = CLIPProcessor.from_pretrained(source)
    inputs = processor(
        text=list(captions), images=list(images), return_tensors="pt", padding=True, truncation=True
    )
    with torch.inference_mode():
        output = clip(**inputs.to(device))
        cosines = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
    return float(100 * cosines.clamp(min=0).mean())
