"""Support of Liger-Kernel: loop engines on GPUs."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.job import Job
from estimator.models.architectures import FAMILIES as ALL_FAMILIES
from estimator.vocabulary import METHODS, TASKS

VERSION = "liger"  # of the engines' rows in data/implementations.csv: kernels in the blocks

# Families whose loss launchers/engines/loop/head.py computes without logits
FAMILIES = tuple(name for name, family in ALL_FAMILIES.items() if family.causal and not family.code_elsewhere)
# Families whose norms, MLP and rotary embeddings it implements, too (0.8.5, transformers/monkey_patch.py).
# tests/launchers/engines/loop/test_liger.py compares both with the models' own code
BLOCK_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(job: Job) -> str | None:
    """Return the reason why a job of the loop cannot use the kernels, as one clause; None if it can."""
    model = job.model
    task = TASKS[job.task]
    if not (task.next_token or task.preferences) or job.task == "reward":
        return f"liger: its loss needs an output head over the vocabulary, and task {job.task} has none"
    if model.family not in FAMILIES:
        return f"liger: its loss was not tested with the output head of {model.family} models"
    if METHODS[job.method].llama_adapter:
        return f"liger with method {job.method}: LLaMA-Adapters change the blocks"
    if job.trained_modules and METHODS[job.method].adapters:
        return "liger with modules trained next to adapters: its loss uses the weight of the head directly"
    return None


def in_blocks(family: str, hidden_act: str, *, compiled: bool, float8: bool) -> bool:
    """Return whether its kernels replace parts of the blocks, not the loss alone.

    Compiled blocks keep their own code, which the compiler fuses, and float8 replaces their products. The
    kernels' MLP is SwiGLU.
    """
    return family in BLOCK_FAMILIES and hidden_act == "silu" and not (compiled or float8)


def version(job: Job) -> str:
    """Return the version of the job's engine in ``data/implementations.csv``."""
    compiled, float8 = bool(job.compile), job.fp8 != "none"
    used = job.liger and in_blocks(job.model.family, job.model.hidden_act, compiled=compiled, float8=float8)
    return VERSION if used else ""


def refuse_cpu(job: Job) -> None:
    """Raise UserError for a job with these kernels that is planned on CPUs."""
    if job.liger:
        raise UserError(
            "--liger: its Triton kernels need a GPU, and this job runs on CPUs.",
            "Remove --liger, or run on a GPU.",
        )
