"""What torchtune 0.6.1 can't do, each as one clause for a person. Imports neither torch nor torchtune."""

from __future__ import annotations

from estimator.models import ModelSpec
from launchers.settings import Settings

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Hugging Face's names of the attention's linear layers -> torchtune's."""
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
# NF4 keeps one scale for 64 values and quantises the scales in blocks of 256 (torchao.dtypes.nf4tensor).
_NF4_MULTIPLE = 64 * 256
# Fixed in torchtune/models/llama3_1/_position_embeddings.py: low and high frequency factor, original length.
_LLAMA3_ROPE = (1.0, 4.0, 8192)
# Keys of the YAML that follow from the plan, and the setting that changes each.
_PLANNED_KEYS = {
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
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
    if spec.o_bias or spec.mlp_bias:
        where = "attention's output" if spec.o_bias else "the MLP"
        return f"torchtune 0.6.1 can't build a {spec.family} model with biases on {where}"
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
    for key in _PLANNED_KEYS.keys() & settings.engine_options.keys():
        instead = f"; set {_PLANNED_KEYS[key]} instead" if _PLANNED_KEYS[key] else ""
        return f"engine_options.{key} can't be set by hand, the run's own accounting depends on it{instead}"
    return None if settings.method == "full" else _unsupported_adapters(settings, spec)


def _unsupported_adapters(settings: Settings, spec: ModelSpec) -> str | None:
    targets = set(settings.lora.targets)
    if not targets & ATTENTION.keys():
        return "torchtune 0.6.1's LoRA needs one of q_proj, k_proj, v_proj, o_proj among lora.targets"
    if targets & MLP and not targets >= MLP:
        return "torchtune 0.6.1 puts LoRA on gate_proj, up_proj and down_proj together or on none of them"
    processes = (settings.resources.nodes or 1) * (settings.resources.gpus or 1)
    return unsupported_shards(spec, processes) if settings.method == "qlora" else None


def unsupported_shards(spec: ModelSpec, processes: int) -> str | None:
    """Why NF4 weights can't be spread over that many processes: each must get whole blocks of each matrix."""
    for name, (rows, columns) in spec.linear_shapes.items():
        if rows * columns % (_NF4_MULTIPLE * processes) or rows % processes:
            shared = f" for each of {processes} processes" if processes > 1 else ""
            return (
                f"NF4 needs matrices of a multiple of {_NF4_MULTIPLE} values{shared}, and {spec.name}'s "
                f"{name} is {rows} x {columns}"
            )
    return None
