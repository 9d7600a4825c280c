"""Limits of GRPO with TRL, each as one clause."""

from __future__ import annotations

from estimator.job import Job
from estimator.models import ModelSpec
from estimator.models.architectures import family_of
from estimator.vocabulary import ENGINES, METHODS, TASKS

ELSEWHERE = "task grpo generates completions in every step, which engine trl supports"


def unsupported(job: Job) -> str | None:
    """Return the reason why TRL 1.16 cannot train a job here, as one clause, or None."""
    model = job.model
    if not TASKS[job.task].draws_answers:
        return f"task {job.task}: engine trl supports only grpo here"
    if job.lora_experts and not model.experts:
        return f"lora.experts: {model.name} has no experts"
    return _model(model) or _training(job)


def _model(model: ModelSpec) -> str | None:
    if not model.causal:
        return f"grpo trains generative models, and {model.name} is an encoder"
    if family_of(model.family).code_elsewhere:
        return f"{model.name} is a {model.family} model, for which transformers has no code"
    if model.experts:
        return f"grpo: TRL is not tested here with mixture-of-experts models such as {model.name}"
    return None


def _training(job: Job) -> str | None:
    if job.has_zero_options("trl") or job.has_fsdp_options:
        return "grpo has a complete copy of the model on each GPU here (DDP), without sharding"
    if job.packing:
        return "packing: grpo generates completions in the step, one sequence each"
    if METHODS[job.method].quantized:
        return "grpo with method qlora: a 4-bit base would be dequantized for every generated token"
    if METHODS[job.method].llama_adapter:
        return f"grpo with method {job.method}: generation does not support prompts of LLaMA-Adapters"
    if job.trained_modules or job.new_tokens:
        setting = "new_tokens" if job.new_tokens else "lora.modules_to_save"
        return f"{setting}: TRL's GRPO uses the original weight of the head, not PEFT's trained copy"
    if job.fp8 != "none":
        return f"fp8 {job.fp8}: TRL's GRPO does not support float8 here"
    if job.liger:
        return "liger: its fused loss is for next-token prediction"
    if job.compile:
        return "compile: generation has changing shapes"
    if job.recomputes_parts:
        return "TRL recomputes complete blocks, and all of them"
    if job.optimizer not in ENGINES["trl"].optimizers:
        return f"optimizer {job.optimizer}: grpo supports {', '.join(ENGINES['trl'].optimizers)} here"
    if job.optimizer_in_backward:
        return "optimizer.in_backward needs engine torchtune, as TRL steps after the backward pass"
    return None
