"""Support of Liger-Kernel: loop engines on GPUs."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.job import Job
from estimator.vocabulary import METHODS, TASKS

VERSION = "liger"  # of the engines' rows in data/implementations.csv

# Families whose norms, MLP, rotary embeddings and loss it implements (0.8.5, transformers/monkey_patch.py),
# and that tests/launchers/engines/loop/test_liger.py compares with and without its kernels
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(job: Job) -> str | None:
    """Return the reason why a job of the loop cannot use the kernels, as one clause; None if it can."""
    model = job.model
    task = TASKS[job.task]
    if not (task.next_token or task.preferences) or job.task == "reward":
        return f"liger: its loss needs an output head over the vocabulary, and task {job.task} has none"
    if model.family not in FAMILIES:
        return f"liger: its kernels support {', '.join(FAMILIES)} models here, not {model.family}"
    if model.hidden_act != "silu":
        return f"liger: its MLP is SwiGLU, and {model.name} has hidden_act {model.hidden_act}"
    if METHODS[job.method].llama_adapter:
        return f"liger with method {job.method}: LLaMA-Adapters change the blocks"
    if job.trained_modules and METHODS[job.method].adapters:
        return "liger with modules trained next to adapters: its loss uses the weight of the head directly"
    return None


def refuse_cpu(job: Job) -> None:
    """Raise UserError for a job with these kernels that is planned on CPUs."""
    if job.liger:
        raise UserError(
            "--liger: its Triton kernels need a GPU, and this job runs on CPUs.",
            "Remove --liger, or run on a GPU.",
        )
