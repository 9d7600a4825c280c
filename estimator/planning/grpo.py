"""Limits of TRL's GRPO as it is run here, each as one clause."""

from __future__ import annotations

from estimator.models import ModelSpec
from estimator.models.architectures import family_of
from estimator.planning.training import Training
from estimator.vocabulary import ENGINES, METHODS, TASKS

ELSEWHERE = "task grpo draws answers in every step, which engine trl does"


def unsupported(model: ModelSpec, training: Training) -> str | None:
    """Return the reason why TRL 1.16 cannot train it here, as one clause, or None."""
    if not TASKS[training.task].draws_answers:
        return f"task {training.task}: engine trl learns grpo alone here"
    if training.lora_experts and not model.experts:
        return f"lora.experts: {model.name} has no experts"
    return _model(model) or _training(training)


def _model(model: ModelSpec) -> str | None:
    if not model.causal:
        return f"grpo trains a model that answers, and {model.name} is an encoder"
    if family_of(model.family).code_elsewhere:
        return f"transformers has no code of {model.family} models, of which {model.name} is one"
    if model.experts:
        return f"grpo: TRL was not tried here with mixtures of experts, of which {model.name} is one"
    return None


def _training(training: Training) -> str | None:
    if training.zero or training.fsdp:
        return "grpo has a whole copy of the model on each GPU here (DDP), so nothing is divided"
    if training.packing:
        return "packing: the answers of grpo are drawn in the step, a sequence each"
    if METHODS[training.method].quantized:
        return "grpo with method qlora: a base in 4 bits would be made whole again for every token drawn"
    if METHODS[training.method].llama_adapter:
        return f"grpo with method {training.method}: LLaMA-Adapters' prompts are not drawn with here"
    if training.trained_modules or training.new_tokens:
        what = "new_tokens" if training.new_tokens else "lora.modules_to_save"
        return f"{what}: TRL's GRPO reads the head's weight past PEFT's trained copy of it"
    if training.fp8 != "none":
        return f"fp8 {training.fp8}: TRL's GRPO has no float8 products here"
    if training.liger:
        return "liger: its loss without logits is that of the next token"
    if training.compile:
        return "compile: answers are drawn token by token, in shapes that change"
    if training.part_recomputed:
        return "TRL recomputes whole blocks, and all of them"
    if training.optimizer not in ENGINES["trl"].optimizers:
        return f"optimizer {training.optimizer}: grpo steps {', '.join(ENGINES['trl'].optimizers)} here"
    if training.optimizer_in_backward:
        return "optimizer.in_backward: TRL steps after the whole backward pass; torchtune can"
    return None
