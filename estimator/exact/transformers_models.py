"""transformers models of any shape, with PEFT adapters and the losses used with them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from estimator.errors import UserError
from estimator.exact import hf_configuration
from estimator.exact.built import BuiltModel, Loss
from estimator.models.architectures import names_in_transformers
from estimator.setup import Setup

# launchers/dataset/batches.py, LOSS_CHUNK: positions whose logits are in fp32 at a time
LOSS_POSITIONS = 1024


def build(setup: Setup) -> BuiltModel:
    """Build transformers' model of the setup on fake tensors, with adapters, forward pass and loss.

    Raises UserError if transformers cannot build the shape, or builds another number of parameters.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # transformers 5.23 lists Mistral 4's language model under the latter alone
    factory = AutoModelForImageTextToText if setup.model.family == "mistral4" else AutoModelForCausalLM
    model = factory.from_config(configuration(setup), dtype=torch.get_default_dtype())
    if sum(parameter.numel() for parameter in model.parameters()) != setup.model.parameters:
        raise UserError(
            f"transformers cannot build a {setup.model.family} model of the shape of {setup.model.name}.",
            "Remove --exact: the formulas cover it.",
        )
    base = model.model if hasattr(model, "model") else model.base_model  # Llama 4 has another prefix
    blocks = max((m for m in base.children() if isinstance(m, nn.ModuleList)), key=len)
    norms = {name: m for name, m in base.named_children() if "norm" in name or name.startswith("ln")}
    norms.pop("per_layer_projection_norm", None)  # Gemma 4's, before the blocks
    last_norm = list(norms.values())[-1]
    if setup.quantization != "none":
        _quantize(blocks)
    if setup.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = _with_adapters(setup, model) if setup.adapters else model
    wrapped.train()
    return BuiltModel(
        model=wrapped, blocks=list(blocks), last_norm=last_norm, forward=_forward(setup, wrapped)
    )


def configuration(setup: Setup) -> Any:
    """Build transformers' configuration object of a model; raises UserError if that fails."""
    from transformers import AutoConfig

    spec = setup.model
    try:
        return AutoConfig.for_model(spec.family, **hf_configuration.values(spec, setup.seq_len))
    except (ValueError, TypeError) as error:
        reason = str(error).partition(". ")[0]
        raise UserError(
            f"transformers has no {spec.family} model of the shape of {spec.name}: {reason}",
            "Remove --exact: the formulas cover it.",
        ) from None


class Nf4Linear(nn.Linear):
    """Linear layer in 4 bits, like Linear4bit of bitsandbytes: dequantized for each product."""

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


def _quantize(blocks: nn.ModuleList) -> None:
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Nf4Linear(child))


def _with_adapters(setup: Setup, model: Any) -> Any:
    from peft import get_peft_model

    config = _prompts(setup) if setup.prompts else _low_rank(setup, model)
    # Fake parameters cannot be moved, and have the right device and type already
    no_moves = mock.patch.object(nn.Module, "to", lambda module, *_, **__: module)
    # launchers/engines/loop/model.py keeps the type of the base; PEFT's default is fp32
    with no_moves:
        return get_peft_model(model, config, autocast_adapter_dtype=setup.engine != "deepspeed")


def _prompts(setup: Setup) -> Any:
    from peft import AdaptionPromptConfig

    layers = setup.model.layers - setup.llama_adapter.start_layer
    return AdaptionPromptConfig(
        adapter_len=setup.llama_adapter.prompt_length, adapter_layers=layers, task_type="CAUSAL_LM"
    )


def _low_rank(setup: Setup, model: Any) -> Any:
    from peft import LoraConfig

    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    # launchers/engines/loop/model.py translates generic names; a user's own Trainer script does not
    names = setup.lora_targets
    if setup.runs_loop:
        names = names_in_transformers(setup.model.family, names)
    targets = [target for target in names if target in linear]
    if not targets:
        raise UserError(
            f"lora_targets = {', '.join(setup.lora_targets)}: {setup.model.name} has no such linear layers.",
            f"Its linear layers are {', '.join(sorted(linear))}.",
        )
    return LoraConfig(
        r=setup.lora_rank,
        lora_alpha=2 * setup.lora_rank,
        target_modules=targets,
        exclude_modules=r".*\.indexer\..*" if setup.model.compressed_attention else None,
        use_dora=setup.method == "dora",
        task_type="CAUSAL_LM",
    )


def _forward(setup: Setup, model: Any) -> Loss:
    # The calling loop holds the output with its logits, or frees it before the backward pass
    loop_holds_logits = setup.engine != "transformers" or setup.engine_version == "loop"
    live_outputs: list[Any] = []

    def run(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {}
        if setup.document_mask:
            batch, length = tokens.shape
            options["attention_mask"] = torch.ones(batch, 1, length, length, dtype=torch.bool)
        label_options = {"labels": labels} if setup.loss == "plain" else {}
        output = model(input_ids=tokens, **label_options, **options)
        live_outputs[:] = [output] if loop_holds_logits else []
        return output.loss if label_options else summed_cross_entropy(output.logits, labels)

    return run


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss of launchers/dataset/batches.py: a sum over positions, with two fp32 copies per chunk.

    logits [batch, length, vocabulary], labels [batch, length] -> scalar.
    """

    def chunk_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")

    total = torch.zeros(())
    logit_chunks = torch.split(logits.flatten(0, -2), LOSS_POSITIONS)
    label_chunks = torch.split(labels.flatten(), LOSS_POSITIONS)
    for chunk in zip(logit_chunks, label_chunks, strict=True):
        total = total + checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False)
    return total
