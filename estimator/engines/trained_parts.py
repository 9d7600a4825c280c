"""Models for which the loop can train LLaMA-Adapters, and full modules next to LoRA adapters."""

from __future__ import annotations

from estimator.models import ModelSpec
from estimator.vocabulary import METHODS

# PEFT 0.18, tuners/adaption_prompt/config.py (and GPT-2), tested with the prompt attention of
# launchers/engines/loop/adapter_v2.py.
PROMPT_FAMILIES = {"adapter-v1": ("llama", "mistral"), "adapter-v2": ("llama", "mistral", "qwen2", "qwen3")}
# Families tested with launchers/engines/loop/whole_modules.py (embeddings, heads and norms).
FULL_MODULE_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


def llama_adapter(model: ModelSpec, method: str) -> str | None:
    """Return the reason why a model cannot have LLaMA-Adapter's prompts or v2's scales; None if it can."""
    families = PROMPT_FAMILIES[method]
    if model.family not in families:
        return f"{method} supports {', '.join(families)} models here, and {model.name} is {model.family}"
    if method == "adapter-v1" and model.q_dim != model.hidden:
        return (
            f"adapter-v1: PEFT's prompts need heads * head_dim = hidden, and {model.name} has "
            f"{model.heads} * {model.head_dim} and {model.hidden}"
        )
    if method == "adapter-v1" and model.o_bias:
        return f"adapter-v1: PEFT adds the bias of attention's output twice, which {model.name} has"
    return None


def modules_to_save(model: ModelSpec) -> str | None:
    """Return the reason why a model cannot have lora.modules_to_save; None if it can."""
    if model.family in FULL_MODULE_FAMILIES:
        return None
    families = ", ".join(FULL_MODULE_FAMILIES)
    return f"lora.modules_to_save supports {families} models here, and {model.name} is {model.family}"


def new_tokens(model: ModelSpec, method: str) -> str | None:
    """Return the reason why tokens cannot be added to a model; None if they can."""
    if METHODS[method].llama_adapter:
        return f"new_tokens: {method} trains neither embeddings nor head"
    if model.family in FULL_MODULE_FAMILIES:
        return None
    families = ", ".join(FULL_MODULE_FAMILIES)
    return f"new_tokens supports {families} models here, and {model.name} is {model.family}"
