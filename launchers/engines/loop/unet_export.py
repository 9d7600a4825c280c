"""Export of a trained UNet: its weights, or its LoRA in the formats that image programs read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from launchers.engines import _merge, _pipeline_layout
from launchers.engines._merge import Update
from launchers.engines.loop import unet
from launchers.engines.loop.sharding import TrainedModel
from launchers.gang.job import TrainJob
from launchers.settings.sections import Lora

ADAPTER = "default"  # PEFT's name of an adapter without a name


def save(model: TrainedModel, job: TrainJob, state: dict[str, Any] | None) -> None:
    """Write the complete UNet to output/model/unet, and LoRA also to output/adapter; called on rank 0.

    Merged text encoders are written next to the UNet.
    """
    shutil.rmtree(job.output_dir, ignore_errors=True)
    unet_dir = job.output_dir / "model" / _pipeline_layout.UNET
    if not job.plan.adapters:
        unet_dir.mkdir(parents=True)
        trained = model.module.state_dict() if state is None else state
        save_file(_on_cpu(trained), unet_dir / _pipeline_layout.WEIGHTS, metadata={"format": "pt"})
        return
    adapters = {
        name: Adapter(_adapter_tensors(network, _part_of(state, name, model.module)), network.peft_config)
        for name, network in networks_of(model.module).items()
    }
    save_adapters(adapters, job.settings.lora, job.output_dir / "adapter")
    if job.settings.merges(job.plan.method):
        for name, adapter in adapters.items():
            target = job.output_dir / "model" / name
            merge(adapter.tensors, job.settings.lora, job.model_dir / name, target)


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA of one network: its matrices by PEFT's names, such as "mid_block...to_q.lora_A.weight"."""

    tensors: dict[str, torch.Tensor]
    peft_config: Mapping[str, Any]


def networks_of(module: Any) -> dict[str, Any]:
    """Return the trained networks by the names of their folders."""
    if not unet.has_texts(module):
        return {_pipeline_layout.UNET: module}
    return {name: getattr(module, name) for name in (_pipeline_layout.UNET, *_pipeline_layout.TEXTS)}


def _part_of(state: dict[str, Any] | None, name: str, module: Any) -> dict[str, Any] | None:
    """Return the tensors of one network from the state of ``module``, by their names in the network."""
    if state is None or not unet.has_texts(module):
        return state
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _on_cpu(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _adapter_tensors(network: Any, state: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    from peft.utils import get_peft_model_state_dict

    return _on_cpu(get_peft_model_state_dict(network, state_dict=state, adapter_name=ADAPTER))


def save_adapters(adapters: Mapping[str, Adapter], lora: Lora, folder: Path) -> None:
    """Write LoRA in diffusers' format, and in kohya's, which ComfyUI and A1111 read.

    ``adapters``: by the name of the network's folder.
    """
    from diffusers import StableDiffusionXLPipeline
    from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya

    tensors = {name: _with_text_model(name, adapter.tensors) for name, adapter in adapters.items()}
    options: dict[str, Any] = {}
    for name, adapter in adapters.items():
        options[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(tensors[name])
        options[f"{name}_lora_adapter_metadata"] = adapter.peft_config[ADAPTER].to_dict()
    StableDiffusionXLPipeline.save_lora_weights(str(folder), **options)
    all_tensors = {f"{name}.{key}": tensor for name in adapters for key, tensor in tensors[name].items()}
    kohya = convert_state_dict_to_kohya(all_tensors)
    for name in [name for name in kohya if name.endswith(".alpha")]:
        kohya[name] = torch.tensor(scale_of(lora) * lora.rank)  # diffusers writes the rank: scale 1
    save_file(_on_cpu(kohya), folder / _pipeline_layout.KOHYA, metadata={"format": "pt"})


def _with_text_model(network: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Restore the ``text_model`` level, which CLIPTextModel of transformers 5.23 lacks and readers expect."""
    if network not in _pipeline_layout.TEXTS:
        return tensors
    level = "text_model."
    return {key if key.startswith(level) else level + key: tensor for key, tensor in tensors.items()}


def scale_of(lora: Lora) -> float:
    """Return the factor of the product of an adapter's matrices; rsLoRA: arXiv:2312.03732."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def merge(tensors: dict[str, torch.Tensor], lora: Lora, base: Path, destination: Path) -> None:
    """Add LoRA to a base network in fp32; keep the base's files, names and types."""
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    updates = {
        f"{layer}.weight": Update(
            lora_a=tensors[f"{layer}.lora_A.weight"],
            lora_b=tensors[f"{layer}.lora_B.weight"],
            scale=scale_of(lora),
            magnitudes=None,
        )
        for layer in layers
    }

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        update = updates.pop(name, None)
        return weight if update is None else update.applied_to(weight)

    _merge.merge(_pipeline_layout.weight_files(base), destination, change)
    if updates:
        raise RuntimeError(f"the base's {base.name} has no {next(iter(updates))} to merge into")
