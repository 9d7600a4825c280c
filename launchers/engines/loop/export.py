"""Export of a trained model: a model in Hugging Face format, and its adapter in a separate folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from estimator.errors import UserError
from launchers.engines import _merge
from launchers.engines._merge import Update
from launchers.engines.loop import quantized_experts, quantized_model, unet, unet_export
from launchers.engines.loop.sharding import TrainedModel
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv
from launchers.models import hf_layout

_ADAPTER_PREFIX = "base_model.model."


def check_mergeable(network: Any, job: TrainJob) -> None:
    """Raise UserError if the adapter cannot be merged into the base's files. Called before training.

    transformers renames the tensors of some families on loading, and joins those of experts.
    """
    quantized_experts.parts(network)
    adapted = [name for name, module in network.named_modules() if hasattr(module, "lora_A")]
    names = [f"{name.removeprefix(_ADAPTER_PREFIX)}.weight" for name in adapted]
    stored = tensor_names(job)
    missing = [name for name in _names_in_files(network, names, stored).values() if name not in stored]
    if missing:
        raise UserError(
            f"{job.settings.model}: its files have no {missing[0]}, which its adapter is to be merged into.",
            "Use --method full.",
        )


def tensor_names(job: TrainJob) -> set[str]:
    """Return the names of the tensors in the base's files."""
    return {
        name for path in hf_layout.weight_files(job.model_dir) for name in hf_layout.safetensors_header(path)
    }


def _names_in_files(network: Any, names: Iterable[str], stored: set[str]) -> dict[str, str]:
    """Map the names of weights in the model to their names in the base's files.

    ``stored``: names of all tensors in these files. Names differ in families whose modules transformers
    renamed (Nemotron-H), and in vision-language models published before transformers placed vision tower and
    language model side by side.
    """
    from transformers.core_model_loading import revert_weight_conversion

    base = network.get_base_model()
    empty = torch.empty(1, device="meta")
    return {
        name: name if name in stored else next(iter(revert_weight_conversion(base, {name: empty})))
        for name in names
    }


def save(model: TrainedModel, job: TrainJob, env: RankEnv) -> None:
    """Write output/model and, for adapters, output/adapter on rank 0; called by every rank.

    Two kinds of adapters are not merged, so they have no output/model: LLaMA-Adapters, and adapters on
    experts, which are separate tensors in the base's files and one tensor in transformers.
    """
    state = model.trained_state(job)
    if env.rank != 0:
        return
    if unet.is_unet(model.module):
        unet_export.save(model, job, state)
        return
    shutil.rmtree(job.output_dir, ignore_errors=True)
    if not job.plan.adapters:
        model.module.save_pretrained(job.output_dir / "model", state_dict=state)
        return
    adapter = job.output_dir / "adapter"
    if job.plan.method == "adapter-v2":
        from launchers.engines.loop import adapter_v2

        trained = {name: p.detach().cpu() for name, p in model.module.named_parameters() if p.requires_grad}
        adapter_v2.save(state or trained, adapter_v2.AdapterV2.of(job.settings.adapter), adapter)
        return
    # the default, "auto", compares vocabularies and may fetch the base model's from the Hub
    model.module.save_pretrained(adapter, state_dict=state, save_embedding_layers=False)
    if not job.settings.merges(job.plan.method):
        return
    stored = tensor_names(job)

    def names_in_files(names: Iterable[str]) -> dict[str, str]:
        return _names_in_files(model.module, names, stored)

    base_of = quantized_model.as_trained_on(model.module, model.device, names_in_files)
    merge(job.model_dir, adapter, job.output_dir / "model", base_of, names_in_files)


def merge(
    base: Path,
    adapter: Path,
    destination: Path,
    base_of: quantized_model.Change = quantized_model.unchanged,
    names_in_files: Callable[[Iterable[str]], dict[str, str]] | None = None,
) -> None:
    """Add the adapter to the base weights on the CPU, in fp32; keep the base's files, names and types.

    ``base_of``: maps a name and a base weight to the values that the adapter was trained on.
    ``names_in_files``: maps names of weights in the model to names in the base's files, if they differ.
    """
    updates = _updates(adapter)
    if names_in_files is not None:
        updates = {new: updates[name] for name, new in names_in_files(updates).items()}
    config = json.loads((base / "config.json").read_text())
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))

    def change(name: str, base_weight: torch.Tensor) -> torch.Tensor:
        weight = base_of(name, base_weight)
        update = updates.pop(name, None)
        return (weight if update is None else update.applied_to(weight)).to(base_weight.dtype)

    _merge.merge(hf_layout.weight_files(base), destination, change)
    if tied and isinstance(updates.get("lm_head.weight"), _Replacement):
        del updates["lm_head.weight"]  # tied to the embedding
    if updates:
        raise RuntimeError(
            f"the base model has no weights called {', '.join(sorted(updates)[:3])} to merge into"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replacement:
    """Tensor trained in full (PEFT's modules_to_save)."""

    trained: torch.Tensor

    def applied_to(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the trained tensor in the type of ``weight``."""
        return self.trained.to(weight.dtype)


def _updates(adapter: Path) -> dict[str, Update | _Replacement]:
    """Read an adapter in PEFT's format: updates by the name of the base's weight.

    The scale is alpha / rank for LoRA, alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(adapter / "adapter_model.safetensors")
    updates: dict[str, Update | _Replacement] = {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        updates[layer.removeprefix(_ADAPTER_PREFIX) + ".weight"] = Update(
            lora_a=tensors.pop(name),
            lora_b=tensors.pop(f"{layer}.lora_B.weight"),
            scale=scale,
            magnitudes=tensors.pop(f"{layer}.lora_magnitude_vector", None),
        )
    if unmerged := sorted(name for name in tensors if "lora_" in name):
        raise RuntimeError(f"the adapter holds what cannot be merged: {', '.join(unmerged[:3])}")
    return updates | {
        name.removeprefix(_ADAPTER_PREFIX): _Replacement(trained=tensors[name]) for name in tensors
    }
