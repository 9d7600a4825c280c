"""torchtune models of any shape, built and called as in its recipes (torchtune 0.6.1).

Also for torchtitan: its Llama has the same operations, except for norms, loss and plans.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import nn

from estimator.exact import compiled
from estimator.exact.built import BuiltModel, Loss
from estimator.exact.torchtune_imports import torchtune_imports
from estimator.setup import Setup

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}


def build(setup: Setup) -> BuiltModel:
    """Build torchtune's model of the setup on fake tensors, with its forward pass and loss."""
    with torchtune_imports():
        from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE

    name, extra = _builder(setup)
    module = import_module(f"torchtune.models.{name}")
    builder = getattr(module, f"lora_{name}" if setup.adapters else name)
    spec = setup.model
    # The real function reads the values of frequencies, which fake tensors do not have
    with mock.patch.object(Llama3ScaledRoPE, "apply_scaling", lambda _, frequencies, *__: frequencies):
        model = builder(
            **(_adapters(setup) if setup.adapters else {}),
            **extra,
            vocab_size=spec.vocab,
            num_layers=spec.layers,
            num_heads=spec.heads,
            num_kv_heads=spec.kv_heads,
            embed_dim=spec.hidden,
            intermediate_dim=spec.ffn,
            max_seq_len=setup.seq_len,
            norm_eps=spec.norm_eps,
            rope_base=spec.rope_theta,
        )
    if setup.adapters:
        _freeze(model)
    if setup.engine == "torchtitan":
        norms: list[Any] = [m for m in model.modules() if type(m).__name__ == "RMSNorm"]
        for norm in norms:
            norm.forward = _torchtitan_norm(norm)
    if setup.loss == "chunked":
        model.set_num_output_chunks(setup.loss_chunks)
    return BuiltModel(
        model=model, blocks=list(model.layers), last_norm=model.norm, forward=_forward(setup, model)
    )


def compile_blocks(setup: Setup, built: BuiltModel) -> None:
    """Compile the blocks as torchtune's recipes do. Call it before :func:`checkpoint_blocks`."""
    compiled.compile_blocks(setup, built.blocks, _compute_type(setup))


def _compute_type(setup: Setup) -> torch.dtype:
    return torch.float32 if setup.precision == "fp32" else torch.bfloat16


def checkpoint_blocks(setup: Setup, built: BuiltModel) -> None:
    """Wrap the blocks for activation checkpointing.

    "full": torchtune's wrapping of each block. "selective": torchtitan's, which saves by operation.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.training import set_activation_checkpointing

    layers: Any = built.model.layers
    if setup.checkpointing == "full":
        set_activation_checkpointing(built.model, auto_wrap_policy={TransformerSelfAttentionLayer})
    else:
        for number, block in enumerate(list(layers)):
            layers[number] = checkpoint_wrapper(
                block, context_fn=_selective_contexts, preserve_rng_state=False
            )
    built.blocks = list(layers)


def _selective_contexts() -> Any:
    """Save attention and every second product, recompute the rest (torchtitan's option "op")."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saved = operation is aten._scaled_dot_product_flash_attention_for_cpu.default
        if operation is aten.mm.default:
            phase = "recompute" if context.is_recompute else "forward"
            products[phase] += 1
            saved = products[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _builder(setup: Setup) -> tuple[str, dict[str, Any]]:
    """Return torchtune's builder and its specific arguments; Llama 2 is Llama 3 with another rotary base."""
    spec = setup.model
    if spec.family == "qwen2":
        return "qwen2", {"tie_word_embeddings": spec.tied_embeddings}
    if spec.family == "mistral":
        return "mistral", {}
    if spec.tied_embeddings:
        return "llama3_2", {"tie_word_embeddings": True}
    return ("llama3_1" if spec.rope_scaling_factor else "llama3"), {}


def _adapters(setup: Setup) -> dict[str, Any]:
    targets = setup.lora_targets
    return {
        "lora_attn_modules": [name for hf, name in ATTENTION.items() if hf in targets],
        "apply_lora_to_mlp": "gate_proj" in targets,
        "lora_rank": setup.lora_rank,
        "lora_alpha": 2 * setup.lora_rank,
        "lora_dropout": 0.0,
        "use_dora": setup.method == "dora",
        "quantize_base": setup.quantization != "none",
    }


def _freeze(model: nn.Module) -> None:
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    set_trainable_params(model, get_adapter_params(model))


def _torchtitan_norm(norm: Any) -> Any:
    """Convert to torchtitan's norm: nn.RMSNorm in the type of its input; torchtune's uses an fp32 copy."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, norm.normalized_shape, norm.scale, norm.eps)

    return forward


def _forward(setup: Setup, model: nn.Module) -> Loss:
    """Return the ``_loss_step`` of the recipes: logits are freed before the backward pass."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    chunked = CEWithChunkedOutputLoss(num_output_chunks=setup.loss_chunks)
    cross_entropy: Any = nn.functional.cross_entropy
    if setup.compile and setup.engine == "torchtune":
        lengths = [len(part) for part in torch.arange(setup.seq_len, device="meta").chunk(setup.loss_chunks)]
        shapes = {(setup.sequences * length, setup.model.vocab) for length in lengths}
        if setup.loss == "chunked":
            chunk_loss = chunked.compute_cross_entropy
            chunked.compute_cross_entropy = compiled.compile_loss(chunk_loss, shapes, _compute_type(setup))
        elif setup.adapters and setup.world_size == 1:  # the other recipes ignore the result of compile_loss
            cross_entropy = compiled.compile_loss(
                cross_entropy, {(setup.tokens, setup.model.vocab)}, torch.float32
            )

    def run(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        options: dict[str, Any] = {}
        if setup.document_mask:
            options["mask"] = torch.ones(batch, length, length, dtype=torch.bool)
            options["input_pos"] = torch.zeros(batch, length, dtype=torch.long)
        logits = model(tokens, **options)
        if setup.loss == "chunked":
            return chunked(logits, labels)  # type: ignore[no-any-return]
        logits = logits.flatten(0, 1)
        return cross_entropy(logits, labels.flatten())  # type: ignore[no-any-return]

    return run
