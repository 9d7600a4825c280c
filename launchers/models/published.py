"""Conversion of published checkpoints for training: weights to bf16, and only the language model.

It runs once per checkpoint, on the CPU, with one shard in memory at a time. Formats: MXFP4 (GPT-OSS), FP8
with block scales (DeepSeek V3), FP4 next to FP8 (DeepSeek V4), AWQ, GPTQ, compressed-tensors (Kimi K2.5) and
bitsandbytes' 4 and 8 bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from estimator.models import hf_config, weight_formats
from launchers.base.imports import collector_paused
from launchers.models import conversion, dequantize
from launchers.models.files import read_config, tensor_shapes, weight_files

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 * 1024**3  # maximum size of an output file, which is built in memory
_LANGUAGE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
_LANGUAGE_HEAD = re.compile(r"^(?:model\.)?language_model\.lm_head\.")


def describe(config: Mapping[str, Any]) -> str:
    """Describe the conversion that a checkpoint needs, as a phrase for the log."""
    parts = []
    if method := quantization_of(config):
        parts.append(f"{weight_formats.FORMATS[method].title} weights to bf16")
    if "text_config" in config:
        parts.append("the language model of a multimodal checkpoint")
    return " and ".join(parts)


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the quantization method of the weights; empty for 16 or 32 bits."""
    return hf_config.weight_format(hf_config.quantization_options(config))


def bf16_bytes(source: Path) -> int:
    """Estimate the bytes of the converted model from the sizes of the published files."""
    published_bytes = sum(path.stat().st_size for path in weight_files(source))
    method = quantization_of(read_config(source))
    bytes_each = weight_formats.FORMATS[method].bytes_each if method else weight_formats.BF16_BYTES
    return int(published_bytes * weight_formats.BF16_BYTES / bytes_each)


def write_trainable(source: Path, folder: Path) -> None:
    """Write config.json and bf16 safetensors of the checkpoint in ``source`` to ``folder``."""
    config = read_config(source)
    trainable = dict(hf_config.language_part(config, str(source)))
    for name in ("quantization_config", "expert_dtype", "torch_dtype"):
        trainable.pop(name, None)
    model_type, class_name = _causal_class(trainable["model_type"], source)
    trainable |= {"dtype": "bfloat16", "model_type": model_type, "architectures": [class_name]}
    if "text_config" in config:  # outer and inner configuration may disagree
        names = tensor_shapes(source, quantized=True)
        trainable["tie_word_embeddings"] = not any(name.endswith("lm_head.weight") for name in names)
    (folder / "config.json").write_text(json.dumps(trainable, indent=2) + "\n", encoding="utf-8")
    conversion.write_shards(_shards(source, config), folder)


def _causal_class(model_type: str, source: Path) -> tuple[str, str]:
    """Return transformers' model_type and class for next-token prediction; raises UserError without one."""
    with collector_paused():
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    for family in (model_type, hf_config.shared_code(model_type)):
        if family in CLASSES:
            return family, str(CLASSES[family])
    raise UserError(
        f"{source}: transformers has no language model of model_type {model_type!r}.",
        "Update transformers, or choose another model.",
    )


def _shards(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Group the converted tensors into files of at most SHARD_BYTES: (file name, tensors)."""
    shard: dict[str, torch.Tensor] = {}
    size, number = 0, 1
    for name, tensor in _tensors(source, config):
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield f"model-{number:05d}.safetensors", shard
            shard, size, number = {}, 0, number + 1
        shard[name] = tensor
        size += tensor.nbytes
    yield f"model-{number:05d}.safetensors" if number > 1 else "model.safetensors", shard


def _tensors(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, tensor) of the language model, dequantized and in bf16."""
    with collector_paused():
        import torch
        from safetensors import safe_open

    method = quantization_of(config)
    options = hf_config.quantization_options(config)
    multimodal = "text_config" in config
    with ExitStack() as open_files:
        files = {
            path: open_files.enter_context(safe_open(path, framework="pt")) for path in weight_files(source)
        }
        file_of_tensor = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 - no mapping
        for name, parts in dequantize.groups(method, file_of_tensor):
            target_name = _language_name(name) if multimodal else name
            if target_name is None:
                continue
            tensors = {part: file_of_tensor[stored].get_tensor(stored) for part, stored in parts.items()}
            tensor = dequantize.dequantize(method, options, tensors)
            if tensor.is_floating_point():
                tensor = tensor.to(torch.bfloat16)
            yield target_name, tensor.contiguous()


def _language_name(name: str) -> str | None:
    """Translate a multimodal checkpoint's tensor name to the language model's; None for other parts."""
    if _LANGUAGE_HEAD.match(name):
        return _LANGUAGE_HEAD.sub("lm_head.", name)
    if _LANGUAGE.match(name):
        return _LANGUAGE.sub("model.", name)
    return name if name.startswith("lm_head.") else None
