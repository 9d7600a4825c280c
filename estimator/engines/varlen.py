"""Models that the loop engines train with variable-length attention instead of a dense document mask."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.job import Job
from estimator.models import ModelSpec
from estimator.models.architectures import family_of
from estimator.vocabulary import METHODS, TASKS, product_type

# Families whose code passes the lengths to the attention function and has no other part that mixes documents;
# tests/launchers/engines/loop/test_varlen.py compares packed documents of each of them with each alone
FAMILIES = (
    "llama",
    "mistral",
    "ministral",
    "ministral3",
    "mistral4",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma3_text",
    "gemma4_text",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "smollm3",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "seed_oss",
    "minimax_m2",
)
# Why others keep the mask although their packed documents are separate (transformers 5.23,
# models/*/modeling_*.py)
_NOT_EXCHANGEABLE = "its code has no exchangeable attention"
_INDEXER = "its indexer selects keys with the mask"
REASONS = {
    "gemma2": "its attention caps the scores, which the kernel does not",
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "gptj": _NOT_EXCHANGEABLE,
    "falcon": _NOT_EXCHANGEABLE,
    "stablelm": "its code does not pass the documents' lengths to the attention function",
}
# Of FlashAttention-2. torch.nn.functional.scaled_dot_product_attention pads heads to the multiple, the
# variable-length kernel rejects them (torch 2.13, transformers/cuda/flash_attn/flash_api.cpp,
# mha_varlen_fwd). Blocks without a window that have wider heads (Gemma 4: 512) use torch's memory-efficient
# kernel.
LARGEST_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8


# FlashAttention computes in 16 bits and needs compute capability 8.0. Older GPUs have no bf16: plans for them
# are in fp16 or fp32
NEEDS_GPU = "its kernels need a GPU"
OF_IMAGES = "positions of images need padded rows"
NO_FLASH_ATTENTION = "FlashAttention has no fp32, and needs compute capability 8.0 (Ampere or newer)"


def unsupported(model: ModelSpec, task: str, method: str, precision: str) -> str | None:
    """Return the reason why a job keeps padding and the dense mask, or None if the kernel applies."""
    spec = TASKS[task]
    if product_type(precision) != "bf16":
        return NO_FLASH_ATTENTION
    if not (spec.next_token or spec.preferences) or task == "reward":
        return f"task {task} needs separate rows"
    if METHODS[method].llama_adapter:
        return "LLaMA-Adapters change the attention"
    if model.attention_dropout:
        return (
            f"the kernel has no dropout, and {model.name} has attention_dropout {model.attention_dropout:g}"
        )
    if model.family not in FAMILIES:
        untested = "its attention has not been compared with the kernel"
        reason = REASONS.get(model.family) or family_of(model.family).packing_leak or untested
        return f"{model.family}: {reason}"
    if model.head_dim > LARGEST_HEAD_DIM:
        return f"heads of {model.head_dim} are wider than the kernel's {LARGEST_HEAD_DIM}"
    if model.head_dim % HEAD_DIM_MULTIPLE:
        return f"the kernel needs heads of a multiple of {HEAD_DIM_MULTIPLE}, and they have {model.head_dim}"
    return None


def refuse_cpu(job: Job) -> None:
    """Raise UserError for a job that requires this attention and is planned on CPUs."""
    if job.variable_length:
        raise UserError(
            f"--variable-length: {NEEDS_GPU}, and this job runs on CPUs.",
            "Remove --variable-length, or run on a GPU.",
        )
