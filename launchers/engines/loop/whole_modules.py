"""Modules trained in full in addition to adapters: PEFT's ``modules_to_save``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

EMBEDDINGS = ("embed_tokens", "lm_head")


def norms(model: Any) -> list[nn.Module]:
    """Return a model's norms over the hidden size, without those of queries and keys."""
    return [
        module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm") and ".self_attn." not in name
    ]


def peft_options(model: Any, chosen: Sequence[str]) -> dict[str, Any]:
    """Return LoraConfig's options to train the modules ``chosen`` in lora.modules_to_save.

    PEFT matches suffixes of names: each name is shortened to its last component if that matches no other
    module. If embedding and head are one matrix, only the embedding is listed.
    """
    tied = model.config.tie_word_embeddings and bool({*EMBEDDINGS} & {*chosen})
    modules: list[nn.Module] = []
    if tied or "embed_tokens" in chosen:
        modules.append(model.get_input_embeddings())
    if "lm_head" in chosen and not tied:
        modules.append(model.get_output_embeddings())
    if "norms" in chosen:
        modules += norms(model)
    if not modules:
        return {}
    names = {name for name, module in model.named_modules() if any(module is target for target in modules)}
    return {"modules_to_save": sorted(_unambiguous_suffixes(names, model)), "ensure_weight_tying": tied}


def _unambiguous_suffixes(names: set[str], model: Any) -> set[str]:
    all_names = [name for name, _ in model.named_modules()]
    suffixes = {name: name.rpartition(".")[2] for name in names}
    unambiguous = {
        suffix
        for suffix in suffixes.values()
        if all(name in names for name in all_names if name.endswith(suffix))
    }
    return {suffix if suffix in unambiguous else name for name, suffix in suffixes.items()}


def tie(adapted: Any) -> None:
    """Tie the trained copies of an embedding and its head, if the model ties the originals.

    PEFT does so itself, except on the meta device, where each assignment creates a separate parameter
    (accelerate's init_empty_weights).
    """
    config = adapted.peft_config[adapted.active_adapter]
    if not getattr(config, "ensure_weight_tying", False):
        return
    base = adapted.get_base_model()
    embedding, head = (
        module.modules_to_save[adapted.active_adapter]
        for module in (base.get_input_embeddings(), base.get_output_embeddings())
    )
    head._parameters["weight"] = embedding.weight
