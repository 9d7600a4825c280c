"""What is left at the end: a model in Hugging Face format, and the adapter on its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from launchers.engines import _hf_layout, _merge
from launchers.engines.loop.sharding import ShardedModel
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv

_ADAPTER_PREFIX = "base_model.model."


def save(model: ShardedModel, job: TrainJob, env: RankEnv) -> None:
    """Called by every rank; rank 0 writes the weights: output/model and, for adapters, output/adapter."""
    state = model.trained_state(job)
    if env.rank != 0:
        return
    shutil.rmtree(job.output_dir, ignore_errors=True)
    if job.plan.method == "full":
        model.module.save_pretrained(job.output_dir / "model", state_dict=state)
        return
    adapter = job.output_dir / "adapter"
    # "auto" would look into the base model's vocabulary, on the hub where it has to
    model.module.save_pretrained(adapter, state_dict=state, save_embedding_layers=False)
    merge(job.model_dir, adapter, job.output_dir / "model")


def merge(base: Path, adapter: Path, destination: Path) -> None:
    """Base weights plus adapter on the CPU, in the base's own files, names and types; sums are in fp32."""
    products = _low_rank_products(adapter)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name not in products:
            return weight
        down, up, scale = products.pop(name)
        down = down.float()
        return _merge.by_rows(weight, lambda rows: (up[rows].float() @ down).mul_(scale).add_(weight[rows]))

    _merge.merge(_weight_files(base), destination, change)
    if products:
        raise RuntimeError(
            f"the base model has no weights called {', '.join(sorted(products)[:3])} to merge into"
        )


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load; some repositories hold a second copy in another layout."""
    index = folder / _hf_layout.INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _low_rank_products(adapter: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Name of a base weight: A, B and the factor of B @ A to add to it."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    downs = [name for name in tensors if name.endswith(".lora_A.weight")]
    return {
        name.removeprefix(_ADAPTER_PREFIX).removesuffix(".lora_A.weight") + ".weight": (
            tensors[name],
            tensors[name.replace(".lora_A.", ".lora_B.")],
            scale,
        )
        for name in downs
    }
