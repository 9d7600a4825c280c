"""Export of trained adapters: the adapter, and the base merged with it, shard by shard.

torchtune's recipes gather the complete model on the host and convert it there, for QLoRA with all 4-bit
matrices dequantized. Here only the adapter is gathered; the base is read from its files again. Sums are
computed as in the recipe, so that the merged weights are bitwise equal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, to_nf4

from estimator.exact.torchtune_imports import torchtune_imports
from launchers.engines import _merge
from launchers.engines.torchtune.checkpoint import plain_name
from launchers.engines.torchtune.config import weight_files

with torchtune_imports():
    from torchtune import training
    from torchtune.models import convert_weights
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """The recipe's adapters; ``config``: their configuration for torchtune's checkpointer."""

    rank: int
    alpha: float
    config: dict[str, Any]


def save(
    model: torch.nn.Module,
    adapters: Adapters,
    checkpointer: Any,
    *,
    model_dir: Path,
    output_dir: Path,
    merged: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Write ``output_dir``/epoch_0 (the adapter) and ``output_dir``/model on rank 0; called by every rank.

    ``merged``: whether to write the model. ``dtype``: type in which the model was trained and is written.
    ``device``: device on which it was trained.
    """
    gloo_group = dist.new_group(backend="gloo", timeout=_merge.LIMIT) if dist.is_initialized() else None
    trained = _gather_trained(model)
    if gloo_group is None or dist.get_rank() == 0:
        shutil.rmtree(output_dir, ignore_errors=True)
        parts = {training.ADAPTER_KEY: dict(trained), training.ADAPTER_CONFIG: adapters.config}
        checkpointer.save_checkpoint(parts, epoch=0, intermediate_checkpoint=False, adapter_only=True)
        if merged:
            change = _MergedTensors(model, trained, adapters, model_dir, dtype, device)
            _merge.merge([model_dir / name for name in weight_files(model_dir)], output_dir / "model", change)
            change.check_complete()
    if gloo_group is not None:
        dist.barrier(group=gloo_group)


def _gather_trained(model: torch.nn.Module) -> Tensors:
    """Gather the trained weights on the CPU, by torchtune's names; called by every rank."""
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.detach()
            full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            trained[plain_name(name)] = full_tensor.cpu()
    return trained


class _MergedTensors:
    """Conversion of the base's tensors one by one, merging the adapter into those that have one."""

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Tensors,
        adapters: Adapters,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self._scale = adapters.alpha / adapters.rank
        self._dtype, self._device = dtype, device
        self._to_tune, self._to_hf = _conversions(model_dir)
        self._unmerged = dict(trained)

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        converted = self._to_tune({name: weight})
        if not converted:  # torchtune computes this tensor, or ties it to another
            return None
        ((tune_name, weight),) = converted.items()
        weight = self._as_trained_on(tune_name, weight)
        module = tune_name.removesuffix(".weight")
        lora_a = self._unmerged.pop(f"{module}.lora_a.weight", None)
        if lora_a is not None:
            scaled_lora_b = self._scale * self._unmerged.pop(f"{module}.lora_b.weight")
            weight = _add_update(weight, scaled_lora_b, lora_a)
        ((_, weight),) = self._to_hf({tune_name: weight}).items()
        return weight

    def check_complete(self) -> None:
        if self._unmerged:
            names = ", ".join(sorted(self._unmerged)[:3])
            raise RuntimeError(f"the base model has no weights that {names} could be merged into")

    def _as_trained_on(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a base weight with the values that the adapter was trained on: dequantized if 4-bit."""
        local_tensor = getattr(self._parameters[name], "_local_tensor", self._parameters[name].detach())
        if not isinstance(local_tensor, NF4Tensor):
            return weight.to(self._dtype)
        if not isinstance(self._parameters[name], DTensor):
            state: dict[str, Any] = {name: local_tensor}
            for hook in self._model._state_dict_hooks.values():  # torchtune's hooks dequantize
                hook(self._model, state, "", {})
            return cast("torch.Tensor", state[name])
        # This rank holds a shard of the full tensor that it quantized on loading: quantize that again.
        sizes = {"block_size": local_tensor.block_size, "scaler_block_size": local_tensor.scaler_block_size}
        quantized: torch.Tensor = to_nf4(weight.to(self._dtype).to(self._device), **sizes)
        return quantized.to(self._dtype).cpu()


def _add_update(weight: torch.Tensor, scaled_lora_b: torch.Tensor, lora_a: torch.Tensor) -> torch.Tensor:
    """Add the update in the adapter's type; the result has the weight's type."""
    return _merge.by_rows(weight, lambda rows: weight[rows] + scaled_lora_b[rows] @ lora_a)


def _conversions(model_dir: Path) -> tuple[Callable[[Tensors], Tensors], Callable[[Tensors], Tensors]]:
    """Return torchtune's conversions of names and row order from Hugging Face's format, and back to it."""
    config = json.loads((model_dir / "config.json").read_text())
    shape: dict[str, Any] = {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "dim": config["hidden_size"],
    }
    to_tune, to_hf = convert_weights.hf_to_tune, convert_weights.tune_to_hf
    if config["model_type"] == "qwen2":
        to_tune, to_hf = qwen2_hf_to_tune, qwen2_tune_to_hf
        shape["tie_word_embeddings"] = config["tie_word_embeddings"]
    else:
        shape["head_dim"] = config.get("head_dim")
    return (lambda tensors: to_tune(tensors, **shape)), (lambda tensors: to_hf(tensors, **shape))
