"""transformers' models at any shape, with PEFT's adapters, and the losses that are used with them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from estimator.errors import UserError
from estimator.exact.built import Built, Loss
from estimator.setup import Setup

# launchers/engines/deepspeed_batches.py, LOSS_CHUNK: positions whose logits are in fp32 at a time
LOSS_POSITIONS = 1024

# What a Hugging Face configuration calls it where that is not the usual name
NAMES: dict[str, dict[str, str]] = {
    "mixtral": {"experts": "num_local_experts"},
    "gpt_oss": {"experts": "num_local_experts"},
    "qwen3_moe": {"ffn": "moe_intermediate_size"},
}


def build(setup: Setup) -> Built:
    """The model on fake tensors, with its step's forward pass and loss."""
    from transformers import AutoModelForCausalLM

    config = configuration(setup)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.get_default_dtype()
    )
    base = model.model
    if setup.quantization != "none":
        _quantise(base.layers)
    if setup.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = _with_adapters(setup, model) if setup.adapters else model
    wrapped.train()
    return Built(
        model=wrapped, blocks=list(base.layers), last_norm=base.norm, forward=_forward(setup, wrapped)
    )


def configuration(setup: Setup) -> Any:
    """A Hugging Face configuration of the model's shape."""
    from transformers import AutoConfig

    spec = setup.model
    names = NAMES.get(spec.family, {})
    values: dict[str, Any] = {
        "hidden_size": spec.hidden,
        names.get("ffn", "intermediate_size"): spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied_embeddings,
        "max_position_embeddings": max(spec.max_seq_len, setup.seq_len),
        "rms_norm_eps": spec.norm_eps,
        "pad_token_id": None,
        "use_cache": False,
    }
    if spec.experts:
        values[names.get("experts", "num_experts")] = spec.experts
        values["num_experts_per_tok"] = spec.experts_per_token
    try:
        return AutoConfig.for_model(spec.family, **values)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"transformers makes no {spec.family} model of {spec.name}'s shape: {str(error).splitlines()[0]}",
            "Leave --exact out: the formulas cover it.",
        ) from None


class Nf4Linear(nn.Linear):
    """A linear layer in 4 bits, as bitsandbytes' Linear4bit runs it: made whole for each product."""

    def __init__(self, old: nn.Linear) -> None:
        from estimator.exact.kernels import to_nf4

        nn.Module.__init__(self)
        self.in_features, self.out_features = old.in_features, old.out_features
        self.weight = nn.Parameter(to_nf4(old.weight), requires_grad=False)
        self.bias = old.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        from estimator.exact.kernels import linear_nf4

        product = linear_nf4(input, self.weight)
        return product if self.bias is None else product + self.bias


def _quantise(blocks: nn.ModuleList) -> None:
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Nf4Linear(child))


def _with_adapters(setup: Setup, model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    targets = [target for target in setup.lora_targets if target in linear]
    if not targets:
        raise UserError(
            f"lora_targets = {', '.join(setup.lora_targets)}: {setup.model.name} has no such linear layers.",
            f"Its linear layers are {', '.join(sorted(linear))}.",
        )
    config = LoraConfig(
        r=setup.lora_rank,
        lora_alpha=2 * setup.lora_rank,
        target_modules=targets,
        use_dora=setup.method == "dora",
        task_type="CAUSAL_LM",
    )
    # Parameters that are fake can't be moved, and they are made where they belong in their type
    still = mock.patch.object(nn.Module, "to", lambda module, *_, **__: module)
    # launchers/engines/deepspeed_model.py keeps the base's type; PEFT's own choice is fp32
    with still:
        return get_peft_model(model, config, autocast_adapter_dtype=setup.engine != "deepspeed")


def _forward(setup: Setup, model: Any) -> Loss:
    def run(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {}
        if setup.document_mask:
            batch, length = tokens.shape
            options["attention_mask"] = torch.ones(batch, 1, length, length, dtype=torch.bool)
        if setup.loss == "plain":
            return model(input_ids=tokens, labels=labels, **options).loss  # type: ignore[no-any-return]
        return summed_cross_entropy(model(input_ids=tokens, **options).logits, labels)

    return run


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """launchers/engines/deepspeed_batches.py's loss, which computes each piece's fp32 copy twice."""
    total = torch.zeros(())
    pieces = zip(
        torch.split(logits.flatten(0, -2), LOSS_POSITIONS),
        torch.split(labels.flatten(), LOSS_POSITIONS),
        strict=True,
    )
    for chunk, wanted in pieces:
        total = total + checkpoint(_piece, chunk, wanted, use_reentrant=False, preserve_rng_state=False)
    return total


def _piece(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
