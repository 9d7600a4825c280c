"""Name and configuration (YAML) of the torchtune recipe of a TrainJob. Imports neither torch nor torchtune.

One "epoch" of the recipe is the rest of the run: the order of the rows over all epochs is fixed when the
data is prepared (launchers.dataset.prepared), so the recipe never shuffles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from estimator.engines.support import MLP, unsupported_shards
from estimator.errors import UserError
from estimator.models import ModelSpec, hf_config
from estimator.plan import Layout
from estimator.vocabulary import METHODS, OPTIMIZERS
from launchers.dataset.prepared import Prepared
from launchers.engines import generic_targets
from launchers.gang.job import TrainJob
from launchers.run_config import RunConfig

_PARTS = "launchers.engines.torchtune.parts"
_MODELS = "torchtune.models"
_CHECKPOINTERS = {"qwen2": "launchers.engines.torchtune.qwen2.Qwen2Checkpointer"}

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Hugging Face's names of the attention's linear layers -> torchtune's."""
# Keys of the YAML that follow from the plan, and the setting that changes each.
PLANNED_KEYS = {
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "epochs": "epochs",
    "max_steps_per_epoch": "max_steps",
    "dtype": "precision",
    "device": "resources.device",
    "tensor_parallel_dim": "",
    "optimizer_in_bwd": "optimizer.in_backward",
    "resume_from_checkpoint": "",
    "save_adapter_weights_only": "",
    "output_dir": "output_dir",
    "shuffle": "",
    "dataset": "dataset",
    "collate_fn": "packing",
}


def recipe_name(job: TrainJob) -> str:
    method = "lora" if job.plan.adapters else "full"
    recipe_kind = "distributed" if job.plan.layout.world_size > 1 else "single_device"
    kind = "dpo" if job.settings.trains_on_pairs else "finetune"
    return f"{method}_{kind}_{recipe_kind}"


def recipe_config(job: TrainJob) -> dict[str, Any]:
    """Build the recipe's configuration; ``settings.engine_options`` overrides it.

    Raises UserError if torchtune cannot run the job.
    """
    config_json = json.loads((job.model_dir / "config.json").read_text())
    spec = hf_config.to_spec(config_json, job.model.name)
    settings, layout, data = job.settings, job.plan.layout, Prepared(job.data_dir)
    reason = _plan_mismatch(job, spec, data) or _missing_field(config_json, spec)
    if reason:
        raise UserError(f"torchtune cannot run this: {reason}.", "Try --set engine=deepspeed.")
    in_backward = settings.optimizer.in_backward
    values = {
        "output_dir": str(job.output_dir),
        "seed": settings.seed,
        "shuffle": False,
        "device": layout.device,
        "dtype": layout.precision,
        "model": model_component(spec, settings),
        # A pad id outside the model's vocabulary cannot be embedded; any other token serves as padding.
        "tokenizer": {
            "_component_": f"{_PARTS}.PadOnly",
            "pad_id": data.info.pad_id if 0 <= data.info.pad_id < spec.vocab else 0,
        },
        "dataset": {
            "_component_": f"{_PARTS}.{'PreparedPairs' if settings.trains_on_pairs else 'PreparedDataset'}",
            "folder": str(job.data_dir),
            "start_step": 0 if job.exports_only else job.start_step,  # the recipes require some rows
            "total_steps": job.total_steps,
            "packed": data.info.packed,
        },
        "checkpointer": {
            "_component_": _CHECKPOINTERS.get(spec.family, "torchtune.training.FullModelHFCheckpointer"),
            "checkpoint_dir": str(job.model_dir),
            "checkpoint_files": weight_files(job.model_dir),
            "recipe_checkpoint": None,
            "output_dir": str(job.output_dir),
            "model_type": {"llama": "LLAMA3", "mistral": "MISTRAL", "qwen2": "QWEN2"}[spec.family],
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "batch_size": layout.micro_batch_size,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": layout.accumulation,
        "optimizer_in_bwd": in_backward,
        # "inf" measures the norm without clipping; an optimizer in the backward pass has no norm.
        "clip_grad_norm": settings.clip_grad_norm or (None if in_backward else "inf"),
        "compile": settings.compile,
        "optimizer": _optimizer(settings, layout),
        "lr_scheduler": _schedule(settings),
        "loss": _loss(settings),
        "enable_activation_checkpointing": layout.activation_checkpointing,
        "enable_activation_offloading": False,
        "metric_logger": {"_component_": f"{_PARTS}.NoLogger"},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
    }
    return merge(values, settings.engine_options)


def _plan_mismatch(job: TrainJob, spec: ModelSpec, data: Prepared) -> str | None:
    layout = job.plan.layout
    if layout.tensor_parallel > 1:
        return "its recipes clip gradients only without tensor parallelism"
    if data.info.global_batch_size != layout.global_batch_size:
        return (
            f"the data was prepared for a global batch of {data.info.global_batch_size}, the plan has "
            f"{layout.global_batch_size}"
        )
    if data.info.total_steps < job.total_steps:
        return f"the data was prepared for {data.info.total_steps} steps, the job has {job.total_steps}"
    return unsupported_shards(spec, layout.world_size) if METHODS[job.plan.method].quantized else None


def _missing_field(config_json: dict[str, Any], spec: ModelSpec) -> str | None:
    """Describe in one clause a field that torchtune's checkpointer requires but config.json lacks."""
    fields = ["hidden_size", "num_attention_heads", "num_key_value_heads"]
    fields += ["tie_word_embeddings"] if spec.family == "qwen2" else []
    missing = [name for name in fields if name not in config_json]
    return f"the model's config.json has no {missing[0]}, which torchtune reads" if missing else None


def model_component(spec: ModelSpec, settings: RunConfig) -> dict[str, Any]:
    """Return torchtune's builder and its arguments; rotary tables have the length of the sequences."""
    module, extra = _builder(spec)
    adapters = METHODS[settings.method].adapters
    values: dict[str, Any] = {
        "_component_": f"{_MODELS}.{module}.{'lora_' if adapters else ''}{module}",
        "vocab_size": spec.vocab,
        "num_layers": spec.layers,
        "num_heads": spec.heads,
        "num_kv_heads": spec.kv_heads,
        "embed_dim": spec.hidden,
        "intermediate_dim": spec.ffn,
        "max_seq_len": settings.seq_len,
        "attn_dropout": 0.0,
        "norm_eps": spec.norm_eps,
        "rope_base": spec.rope_theta,
        **extra,
    }
    return values | _adapters(settings) if adapters else values


def _builder(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return torchtune's builder for a model, and the arguments that only this builder has.

    Llama 2 uses Llama 3's builder with another rotary base. Among Llama's builders only 3.2's can tie the
    embeddings; a scale of 1 has no effect.
    """
    if spec.family == "qwen2":
        return "qwen2", {"tie_word_embeddings": spec.tied_embeddings}
    if spec.family == "mistral":
        return "mistral", {}
    factor = spec.rope_scaling_factor if spec.rope_scaling_type else None
    if spec.tied_embeddings:
        return "llama3_2", {"scale_factor": factor or 1, "tie_word_embeddings": True}
    if factor:
        return "llama3_1", {"scale_factor": factor}
    return "llama3", {}


def _adapters(settings: RunConfig) -> dict[str, Any]:
    lora, targets = settings.lora, generic_targets(settings)
    return {
        "lora_attn_modules": [tune for hf, tune in ATTENTION.items() if hf in targets],
        "apply_lora_to_mlp": set(targets) >= MLP,
        "apply_lora_to_output": False,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "quantize_base": METHODS[settings.method].quantized,
    }


def _optimizer(settings: RunConfig, layout: Layout) -> dict[str, Any]:
    chosen = settings.optimizer
    common: dict[str, Any] = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if chosen.name == "sgd":
        return {"_component_": "torch.optim.SGD", **common, "momentum": 0.9}
    common |= {"betas": list(chosen.betas), "eps": chosen.eps}
    if name := OPTIMIZERS[chosen.name].bitsandbytes:
        return {"_component_": f"bitsandbytes.optim.{name}", **common}
    return {"_component_": "torch.optim.AdamW", **common, "fused": layout.device == "cuda"}


def _loss(settings: RunConfig) -> dict[str, Any]:
    if not settings.trains_on_pairs:
        return {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    return {
        "_component_": "launchers.engines.torchtune.pair_loss.PairLoss",
        "beta": settings.preference.beta_of(settings.task),
        "label_smoothing": settings.preference.label_smoothing,
    }


def _schedule(settings: RunConfig) -> dict[str, Any]:
    return {"_component_": f"{_PARTS}.schedule", **settings.schedule.model_dump()}


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge ``overrides`` over ``base`` by section; a section that names a component is replaced."""
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        nested = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merge(old, value) if nested and "_component_" not in value else value  # type: ignore[arg-type]
    return result


def weight_files(model_dir: Path) -> list[str]:
    """Return the names of a model's safetensors files; raises UserError if there are none."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    names = [name for name in names if not name.startswith(("adapter", "consolidated"))]
    if not names:
        raise UserError(
            f"{model_dir} holds no *.safetensors weights.", "torchtune reads safetensors only: convert them."
        )
    return names
