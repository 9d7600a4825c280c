"""TrainJob -> the name of a torchtune recipe and its whole YAML. Imports neither torch nor torchtune.

One "epoch" of the recipe is what is left of the run: the order of the rows, epochs included, is fixed when
the data is prepared (launchers.dataset.prepared), so the recipe never shuffles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.models import ModelSpec
from estimator.plan import Layout
from launchers.dataset.prepared import Prepared
from launchers.job import TrainJob
from launchers.settings import Settings

_PARTS = "launchers.engines.torchtune_parts"
_MODELS = "torchtune.models"
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
# NF4 keeps one scale for 64 values and quantises the scales in blocks of 256 (torchao.dtypes.nf4tensor).
_NF4_MULTIPLE = 64 * 256
# Fixed in torchtune/models/llama3_1/_position_embeddings.py: low and high frequency factor, original length.
_LLAMA3_ROPE = (1.0, 4.0, 8192)
# Keys of the YAML that follow from the plan, and the setting that changes each.
_PLANNED_KEYS = {
    "batch_size": "micro_batch",
    "gradient_accumulation_steps": "batch_size",
    "epochs": "epochs",
    "max_steps_per_epoch": "max_steps",
    "dtype": "precision",
    "device": "resources.device",
    "tensor_parallel_dim": "",
    "optimizer_in_bwd": "",
    "resume_from_checkpoint": "",
    "save_adapter_weights_only": "",
    "output_dir": "output_dir",
    "shuffle": "",
    "dataset": "dataset",
    "collate_fn": "packing",
}


def unsupported(settings: Settings, spec: ModelSpec) -> str | None:
    """Why torchtune 0.6.1 can't do this, as one clause, or None."""
    return _unsupported_model(spec) or _unsupported_settings(settings, spec)


def _unsupported_model(spec: ModelSpec) -> str | None:
    if spec.experts > 1:
        return f"torchtune 0.6.1 has no mixture-of-experts models ({spec.name} has {spec.experts} experts)"
    if spec.family not in ("llama", "mistral", "qwen2"):
        return (
            f"torchtune 0.6.1's builders used here are llama, mistral and qwen2, and {spec.name} is "
            f"{spec.family}"
        )
    if spec.q_dim != spec.hidden:
        return (
            f"torchtune 0.6.1 needs heads * head_dim = hidden, and {spec.name} has "
            f"{spec.heads} * {spec.head_dim} and {spec.hidden}"
        )
    if spec.qkv_bias != (spec.family == "qwen2"):
        present = "biases" if spec.qkv_bias else "no biases"
        return f"torchtune 0.6.1 can't build a {spec.family} model with {present} on q, k and v"
    if spec.tied_embeddings and spec.family == "mistral":
        return "torchtune 0.6.1 can't build a mistral model with tied embeddings"
    return _unsupported_rope(spec)


def _unsupported_rope(spec: ModelSpec) -> str | None:
    kind = spec.rope_scaling_type
    if kind is None:
        return None
    if kind != "llama3" or spec.family != "llama":
        return f"torchtune 0.6.1 can't scale the rotary embeddings of a {spec.family} model the {kind} way"
    found = (spec.rope_low_freq_factor, spec.rope_high_freq_factor, spec.rope_original_max_seq_len)
    if found != _LLAMA3_ROPE:
        return f"torchtune 0.6.1 scales rotary embeddings with {_LLAMA3_ROPE}, and {spec.name} has {found}"
    return None


def _unsupported_settings(settings: Settings, spec: ModelSpec) -> str | None:
    seq_len = settings.seq_len or min(2048, spec.max_seq_len)
    if spec.sliding_window and spec.sliding_window < seq_len:
        return (
            f"torchtune 0.6.1 has no sliding-window attention, and {spec.name}'s window of "
            f"{spec.sliding_window} is shorter than seq_len {seq_len}"
        )
    if settings.precision == "bf16-mixed":
        return "torchtune 0.6.1 trains in bf16 or in fp32, not in bf16 with fp32 master weights"
    for key in _PLANNED_KEYS.keys() & settings.engine.keys():
        instead = f"; set {_PLANNED_KEYS[key]} instead" if _PLANNED_KEYS[key] else ""
        return f"engine.{key} can't be set by hand, the run's own accounting depends on it{instead}"
    return None if settings.method == "full" else _unsupported_adapters(settings, spec)


def _unsupported_adapters(settings: Settings, spec: ModelSpec) -> str | None:
    targets = set(settings.lora.targets)
    if not targets & _ATTENTION.keys():
        return "torchtune 0.6.1's LoRA needs one of q_proj, k_proj, v_proj, o_proj among lora.targets"
    if targets & _MLP and not targets >= _MLP:
        return "torchtune 0.6.1 puts LoRA on gate_proj, up_proj and down_proj together or on none of them"
    if settings.method == "qlora":
        for name, (rows, columns) in spec.linear_shapes.items():
            if rows * columns % _NF4_MULTIPLE:
                return (
                    f"NF4 needs matrices of a multiple of {_NF4_MULTIPLE} values, and {spec.name}'s {name} "
                    f"is {rows} x {columns}"
                )
    return None


def recipe_name(job: TrainJob) -> str:
    method = "full" if job.settings.method == "full" else "lora"
    where = "distributed" if job.plan.layout.world_size > 1 else "single_device"
    return f"{method}_finetune_{where}"


def recipe_config(job: TrainJob) -> dict[str, Any]:
    """The recipe's whole configuration; ``settings.engine`` is laid over it last.

    Raises UserError where torchtune can't do what is asked.
    """
    spec = ModelSpec.from_hf_config(_read_config(job.model_dir), job.settings.model)
    settings, layout, data = job.settings, job.plan.layout, Prepared(job.data_dir)
    reason = unsupported(settings, spec) or _misfit(job, data)
    if reason:
        raise UserError(f"torchtune can't run this: {reason}.", "Try --launcher deepspeed.")
    values = {
        "output_dir": str(job.output_dir),
        "seed": settings.seed,
        "shuffle": False,
        "device": layout.device,
        "dtype": layout.precision,
        "model": model_component(spec, settings, layout),
        "tokenizer": {"_component_": f"{_PARTS}.PadOnly", "pad_id": data.info.pad_id},
        "dataset": {
            "_component_": f"{_PARTS}.PreparedDataset",
            "folder": str(job.data_dir),
            "start_step": job.start_step,
            "total_steps": job.total_steps,
            "packed": data.info.packed,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(job.model_dir),
            "checkpoint_files": weight_files(job.model_dir),
            "recipe_checkpoint": None,
            "output_dir": str(job.output_dir),
            "model_type": {"llama": "LLAMA3", "mistral": "MISTRAL", "qwen2": "QWEN2"}[spec.family],
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "batch_size": layout.micro_batch,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": layout.accumulation,
        "optimizer_in_bwd": False,
        # "inf" clips nothing, and the norm is still measured.
        "clip_grad_norm": "inf" if settings.clip_grad_norm is None else settings.clip_grad_norm,
        "compile": settings.compile,
        "optimizer": _optimizer(settings, layout),
        "lr_scheduler": _schedule(settings),
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "enable_activation_checkpointing": layout.activation_checkpointing,
        "enable_activation_offloading": False,
        "fsdp_cpu_offload": layout.offload == "cpu",
        "metric_logger": {"_component_": f"{_PARTS}.NoLogger"},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
    }
    return merge(values, settings.engine)


def _misfit(job: TrainJob, data: Prepared) -> str | None:
    layout = job.plan.layout
    if layout.tensor_parallel > 1:
        return "its recipes clip gradients only without tensor parallelism"
    if data.info.global_batch != layout.global_batch:
        return (
            f"the data was prepared for a global batch of {data.info.global_batch}, the plan has "
            f"{layout.global_batch}"
        )
    if data.info.total_steps < job.total_steps:
        return f"the data was prepared for {data.info.total_steps} steps, the job has {job.total_steps}"
    return None


def model_component(spec: ModelSpec, settings: Settings, layout: Layout) -> dict[str, Any]:
    """The builder and its arguments. Rotary tables are only made as long as the sequences are."""
    module, extra = _builder(spec)
    adapters = settings.method != "full"
    values: dict[str, Any] = {
        "_component_": f"{_MODELS}.{module}.{'lora_' if adapters else ''}{module}",
        "vocab_size": spec.vocab,
        "num_layers": spec.layers,
        "num_heads": spec.heads,
        "num_kv_heads": spec.kv_heads,
        "embed_dim": spec.hidden,
        "intermediate_dim": spec.ffn,
        "max_seq_len": layout.seq_len,
        "attn_dropout": 0.0,
        "norm_eps": spec.norm_eps,
        "rope_base": spec.rope_theta,
        **extra,
    }
    return values | _adapters(settings) if adapters else values


def _builder(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """torchtune's builder for a model, and the arguments that only it has.

    Llama 2 is Llama 3 with another rotary base. Of the Llama builders only 3.2's can tie the embeddings;
    its scaling by 1 is none.
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


def _adapters(settings: Settings) -> dict[str, Any]:
    lora = settings.lora
    return {
        "lora_attn_modules": [tune for hf, tune in _ATTENTION.items() if hf in lora.targets],
        "apply_lora_to_mlp": set(lora.targets) >= _MLP,
        "apply_lora_to_output": False,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "quantize_base": settings.method == "qlora",
    }


def _optimizer(settings: Settings, layout: Layout) -> dict[str, Any]:
    chosen = settings.optimizer
    if chosen.lr == "auto":
        raise ValueError("optimizer.lr is still auto: it should be resolved before training")
    common = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if chosen.name == "sgd":
        return {"_component_": "torch.optim.SGD", **common, "momentum": 0.9}
    return {
        "_component_": "torch.optim.AdamW",
        **common,
        "betas": list(chosen.betas),
        "eps": chosen.eps,
        "fused": layout.device == "cuda",
    }


def _schedule(settings: Settings) -> dict[str, Any]:
    schedule = settings.schedule
    if schedule.name == "cosine":
        component = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        return {"_component_": component, "num_warmup_steps": schedule.warmup_steps}
    return {
        "_component_": f"{_PARTS}.warmup_schedule",
        "shape": schedule.name,
        "num_warmup_steps": schedule.warmup_steps,
    }


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, section by section; naming another component replaces its section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merge(old, value) if both and "_component_" not in value else value  # type: ignore[arg-type]
    return result


def weight_files(model_dir: Path) -> list[str]:
    """Names of the safetensors files of a model; raises UserError when there are none."""
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


def _read_config(model_dir: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return values
