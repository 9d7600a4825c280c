"""Limits of GRPO with TRL, each as one clause."""

from __future__ import annotations

from estimator.engines.training import Training
from estimator.models import ModelSpec
from estimator.models.architectures import family_of
from estimator.vocabulary import ENGINES, METHODS, TASKS

ELSEWHERE = "task grpo generates completions in every step, which engine trl supports"


def unsupported(model: ModelSpec, training: Training) -> str | None:
    """Return the reason why TRL 1.16 cannot train it here, as one clause, or None."""
    if not TASKS[training.task].draws_answers:
        return f"task {training.task}: engine trl supports only grpo here"
    if training.lora_experts and not model.experts:
        return f"lora.experts: {model.name} has no experts"
    return _model(model) or _training(training)


def _model(model: ModelSpec) -> str | None:
    if not model.causal:
        return f"grpo trains generative models, and {model.name} is an encoder"
    if family_of(model.family).code_elsewhere:
        return f"transformers has no code of {model.family} models, of which {model.name} is one"
    if model.experts:
        return f"grpo: TRL is not tested here with mixture-of-experts models such as {model.name}"
    return None


def _training(training: Training) -> str | None:
    if training.zero or training.fsdp:
        return "grpo has a complete copy of the model on each GPU here (DDP), without sharding"
    if training.packing:
        return "packing: grpo generates completions in the step, one sequence each"
    if METHODS[training.method].quantized:
        return "grpo with method qlora: a 4-bit base would be dequantized for every generated token"
    if METHODS[training.method].llama_adapter:
        return f"grpo with method {training.method}: generation does not support prompts of LLaMA-Adapters"
    if training.trained_modules or training.new_tokens:
        setting = "new_tokens" if training.new_tokens else "lora.modules_to_save"
        return f"{setting}: TRL's GRPO uses the original weight of the head, not PEFT's trained copy"
    if training.fp8 != "none":
        return f"fp8 {training.fp8}: TRL's GRPO does not support float8 here"
    if training.liger:
        return "liger: its fused loss is for next-token prediction"
    if training.compile:
        return "compile: generation has changing shapes"
    if training.part_recomputed:
        return "TRL recomputes complete blocks, and all of them"
    if training.optimizer not in ENGINES["trl"].optimizers:
        return f"optimizer {training.optimizer}: grpo supports {', '.join(ENGINES['trl'].optimizers)} here"
    if training.optimizer_in_backward:
        return "optimizer.in_backward: TRL steps after the backward pass; use torchtune"
    return None
