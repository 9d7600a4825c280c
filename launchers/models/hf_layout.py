"""Layout of a trained model as Hugging Face folders, without torch; weights are linked, not copied.

A merged model and its adapter are in separate folders: if adapter_config.json were next to merged weights,
transformers would apply the adapter a second time.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
ADAPTER_V2_CONFIG, ADAPTER_V2_WEIGHTS = "adapter_v2.json", "adapter_v2.safetensors"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "vocab.*",
    "tiktoken.model",
    "merges.txt",
    "tekken.json",
    "LICENSE*",
    "USE_POLICY*",
)
_MODEL_FILES = ("config.json", "generation_config.json")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def weight_files(folder: Path) -> list[Path]:
    """List the weight files that transformers loads; copies in other formats are omitted."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def lay_out_model(weights: Sequence[Path], model_dir: Path, destination: Path) -> None:
    """Create a model folder: ``weights`` (safetensors) under usual names, other files from ``model_dir``."""
    destination.mkdir(parents=True, exist_ok=True)
    _copy_files(model_dir, (*_MODEL_FILES, *_TOKENIZER_FILES, *_code_files(model_dir)), destination)
    dtypes = place_weights(weights, destination)
    _set_dtype(destination / "config.json", dtypes)


def place_weights(weights: Sequence[Path], destination: Path) -> set[str]:
    """Link the weight files, write their index, and return their data types as named in safetensors."""
    if not weights:
        raise FileNotFoundError("the engine left no weights to lay out")
    weight_map: dict[str, str] = {}
    total_size, dtypes = 0, set[str]()
    for number, path in enumerate(weights, start=1):
        is_sharded = len(weights) > 1
        name = f"model-{number:05d}-of-{len(weights):05d}.safetensors" if is_sharded else "model.safetensors"
        for tensor, entry in safetensors_header(path).items():
            weight_map[tensor] = name
            dtypes.add(entry["dtype"])
            total_size += entry["data_offsets"][1] - entry["data_offsets"][0]
        link(path, destination / name)
    if len(weights) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (destination / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return dtypes


def lay_out_adapter(weights: Path, config: dict[str, Any], destination: Path, *, base_model: str) -> None:
    """Create an adapter folder in PEFT's format. ``base_model``: name of the adapter's base model."""
    destination.mkdir(parents=True, exist_ok=True)
    link(weights, destination / "adapter_model.safetensors")
    values = {"task_type": "CAUSAL_LM"} | config | {"base_model_name_or_path": base_model}
    (destination / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n")


def lay_out_adapter_v2(source: Path, destination: Path, *, base_model: str) -> None:
    """Create the folder of a LLaMA-Adapter v2, for ``adapter_v2.load`` of launchers.engines.loop.

    ``base_model``: name of the adapter's base model.
    """
    destination.mkdir(parents=True, exist_ok=True)
    link(source / ADAPTER_V2_WEIGHTS, destination / ADAPTER_V2_WEIGHTS)
    values = json.loads((source / ADAPTER_V2_CONFIG).read_text()) | {"base_model_name_or_path": base_model}
    (destination / ADAPTER_V2_CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def lay_out_tokenizer(model_dir: Path, destination: Path) -> None:
    """Copy the tokenizer's files, for an adapter that is exported without a model."""
    _copy_files(model_dir, (*_TOKENIZER_FILES, *_code_files(model_dir)), destination)


def _code_files(model_dir: Path) -> tuple[str, ...]:
    """Return the pattern of Python files if a configuration of the folder names any (``auto_map``)."""
    configs = [path for path in model_dir.glob("*config.json") if '"auto_map"' in path.read_text()]
    return ("*.py",) if configs else ()


def _copy_files(source: Path, patterns: Sequence[str], destination: Path) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, destination / path.name)


def link(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file systems differ; an existing ``target`` is replaced."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def safetensors_header(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Format: https://huggingface.co/docs/safetensors (eight bytes of length, little-endian, then JSON).
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _set_dtype(config_path: Path, dtypes: set[str]) -> None:
    """Set ``dtype`` in config.json to the weights' type, because transformers loads weights as ``dtype``."""
    if len(dtypes) != 1 or (dtype := _DTYPES.get(next(iter(dtypes)))) is None:
        return
    config = json.loads(config_path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    config_path.write_text(json.dumps(config, indent=2) + "\n")
