"""Support of Liger-Kernel's kernels: engines of the loop on GPUs."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.job import Job
from estimator.models import ModelSpec
from estimator.planning.training import Training
from estimator.vocabulary import METHODS, TASKS

VERSION = "liger"  # of the engines' rows in data/implementations.csv

# Those whose norms, MLP, rotation and loss it has (0.8.5, transformers/monkey_patch.py), and that
# tests/launchers/engines/loop/test_liger.py computes with its kernels and without
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(model: ModelSpec, training: Training) -> str | None:
    """Return the reason why a job of the loop cannot use the kernels, as one clause; None if it can."""
    if not TASKS[training.task].next_token:
        return f"liger: its loss without logits is that of the next token, and {training.task} needs logits"
    if model.family not in FAMILIES:
        return f"liger: its kernels are used here for {', '.join(FAMILIES)} models, not for {model.family}"
    if model.hidden_act != "silu":
        return f"liger: its MLP is SwiGLU, and {model.name} has hidden_act {model.hidden_act}"
    if METHODS[training.method].llama_adapter:
        return f"liger with method {training.method}: LLaMA-Adapters change what the blocks run"
    if training.trained_modules and METHODS[training.method].adapters:
        return "liger with modules trained beside adapters: its loss reads the head's weight itself"
    return None


def refuse_cpu(job: Job) -> None:
    """Raise UserError for a job with these kernels that is planned on CPUs."""
    if job.liger:
        raise UserError(
            "--liger: its kernels are Triton's, for GPUs, and this would run on CPUs.",
            "Leave --liger out, or run where there is a GPU.",
        )
