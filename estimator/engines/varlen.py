"""Models that the loop engines train with variable-length attention instead of a dense document mask."""

from __future__ import annotations

from estimator.models import ModelSpec
from estimator.vocabulary import TASKS

# Families whose code passes the lengths to the attention function and has no custom attention;
# tests/launchers/engines/loop/test_varlen.py compares each of them with the mask
FAMILIES = (
    "llama",
    "mistral",
    "ministral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma3_text",
    "olmo2",
    "phi",
    "phi3",
    "gpt_neox",
    "granite",
    "olmo3",
)
LARGEST_HEAD_DIM = 256  # of FlashAttention-2


def unsupported(model: ModelSpec, task: str) -> str | None:
    """Return the reason why a job keeps padding and the dense mask, or None if the kernel applies."""
    spec = TASKS[task]
    if not (spec.next_token or spec.preferences) or task == "reward":
        return f"task {task} needs separate rows"
    if model.attention_sinks:
        return f"{model.family}'s attention sinks are not in the kernel"
    if model.family not in FAMILIES:
        return f"{model.family}'s attention has not been compared with the kernel"
    if model.head_dim > LARGEST_HEAD_DIM:
        return f"heads of {model.head_dim} are wider than the kernel's {LARGEST_HEAD_DIM}"
    return None
