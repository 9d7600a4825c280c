"""Files of a pipeline folder in diffusers' layout, and verification of their completeness."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from estimator.errors import UserError
from launchers.models import own_code
from launchers.models.files import is_model_file, read_header

INDEX = "model_index.json"
NETWORKS = ("unet", "vae", "text_encoder", "text_encoder_2")
_CONFIG_FILES = {
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
    "scheduler": "scheduler_config.json",
}
# Files to fetch: the weights of each network once, as safetensors; no copies in half precision or in other
# formats, and no single-file pipelines
PATTERNS = (
    INDEX,
    *(f"{name}/{files}" for name in NETWORKS for files in ("*.json", "*.safetensors")),
    *(f"{name}/*" for name in _CONFIG_FILES),
)
NOT_PATTERNS = ("*.fp16.*", "*.non_ema.*", "*/flax_*", "*.onnx", "*.onnx_data", "*/*/*")


def is_pipeline(names: Iterable[str]) -> bool:
    """Whether a folder with these file names is a pipeline."""
    return INDEX in names


def check_complete(folder: Path) -> None:
    """Raise UserError unless every network has a configuration and intact weights, and no file is missing."""
    own_code.check_pipeline(folder / INDEX)
    for name in NETWORKS:
        if not (folder / name / "config.json").is_file():
            raise UserError(f"{folder} has no {name}/config.json.", "Fetch or export the pipeline again.")
        weights = [
            path
            for path in sorted((folder / name).glob("*.safetensors"))
            if is_model_file(f"{name}/{path.name}", PATTERNS, NOT_PATTERNS)
        ]
        if not weights:
            raise UserError(f"{folder} has no weights in {name}.", "Add its *.safetensors.")
        for path in weights:
            read_header(path)
    for name, file in _CONFIG_FILES.items():
        if not (folder / name / file).is_file():
            raise UserError(f"{folder} has no {name}/{file}.", "Fetch or export the pipeline again.")
