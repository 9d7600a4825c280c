"""Limits of exact mode, checked before torch is loaded."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.setup import Setup
from estimator.vocabulary import ENGINES, SHARDINGS, TASKS

TORCHTUNE_FAMILIES = ("llama", "mistral", "qwen2")


def check(setup: Setup) -> None:
    """Raise UserError with the reason if this step cannot be traced."""
    reason = untraceable(setup)
    if reason:
        raise UserError(
            f"Exact mode cannot trace this step: {reason}.", "Remove --exact: the formulas cover it."
        )


def untraceable(setup: Setup) -> str | None:
    """Return the reason why a training step cannot be traced, as one clause; None if it can."""
    model = setup.model
    if not ENGINES[setup.engine].traced_with:
        traced = [name for name, spec in ENGINES.items() if spec.traced_with]
        return f"it supports models of {', '.join(traced)}, not of {setup.engine}"
    if torchtune_modules(setup) and (model.family not in TORCHTUNE_FAMILIES or model.experts):
        return f"{setup.engine}'s {model.family} models are not built here"
    if not model.causal:
        return "encoders have no next-token loss"
    if not TASKS[setup.task].next_token:
        return f"it traces next-token training, not {setup.task}"
    for name, value in (("context", setup.context), ("pipeline", setup.pipeline), ("expert", setup.expert)):
        if value > 1:
            return f"{name} parallelism of {value} is not implemented on fake tensors"
    if setup.flat_parameters:
        return "flat parameters of FSDP1 are not implemented on fake tensors; FSDP2 is"
    if setup.tensor > 1 and not torchtune_modules(setup):
        return "tensor parallelism is traced with torchtune's modules only"
    if setup.tensor > 1 and (model.tied_embeddings or setup.adapters):
        feature = "adapters" if setup.adapters else "tied embeddings"
        return f"torchtune's tensor-parallel plan does not cover {feature}"
    if setup.tensor > model.kv_heads:
        return f"torchtune cannot split {model.kv_heads} key/value heads over {setup.tensor} processes"
    if setup.fp8 != "none":
        return f"fp8 ({setup.fp8}) kernels are not implemented on fake tensors"
    if setup.quantization == "int8":
        return "int8 weights are not implemented on fake tensors"
    if setup.compile and not (torchtune_modules(setup) and setup.tensor == 1):
        return "compiled code is traced for torchtune's modules without tensor parallel"
    if setup.compile and (setup.checkpointing == "selective" or setup.method == "dora"):
        return "compiled code is traced without selective checkpointing and without DoRA"
    if setup.offload != "none" and setup.zero_stage is None:
        return "offload is traced for DeepSpeed only"
    if setup.activation_offload:
        return "offloaded activations are not traced"
    if setup.attention != "flash":
        return "the traced kernels do not save the scores of attention 'math'"
    return _untraceable_parts(setup)


def _untraceable_parts(setup: Setup) -> str | None:
    allowed = ENGINES[setup.engine].traced_losses
    if setup.loss not in allowed:
        return f"{setup.engine} is traced with loss {' or '.join(allowed)}, not {setup.loss}"
    if setup.checkpointing == "selective" and setup.engine != "torchtitan":
        return f"selective checkpointing is torchtitan's; {setup.engine} has none or full"
    if setup.method == "adapter-v2" or (setup.prompts and torchtune_modules(setup)):
        return f"{setup.method} is traced with PEFT's implementation only: v1, on transformers' models"
    if setup.trained_modules or {"lm_head", "embed_tokens"} & set(setup.lora_targets):
        return "adapters on, or full training of, embeddings and head are not traced"
    if setup.adapters and torchtune_modules(setup):
        mlp = {"gate_proj", "up_proj", "down_proj"} & set(setup.lora_targets)
        if 0 < len(mlp) < 3:
            return f"torchtune adapts the complete MLP or none of it, not only {', '.join(sorted(mlp))}"
        if not set(setup.lora_targets) - mlp:
            return "torchtune adapts at least one projection of the attention"
    if setup.upcast_frozen:
        return "frozen fp32 weights next to 4-bit ones depend on casts of bitsandbytes"
    if setup.method == "dora" and setup.quantization != "none":
        return "DoRA on 4-bit weights needs norms of the weights, which fake tensors do not have"
    if setup.optimizer_in_backward and setup.world_size > 1:
        return "an optimizer in the backward pass is traced for torchtune on one device only"
    if SHARDINGS[setup.sharding].fsdp and setup.quantization != "none" and not torchtune_modules(setup):
        return "4-bit weights are sharded by torchtune only"
    return None


def torchtune_modules(setup: Setup) -> bool:
    """Return whether torchtune's modules are traced instead of those of transformers."""
    return ENGINES[setup.engine].traced_with == "torchtune"
