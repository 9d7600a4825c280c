"""Activation checkpointing: which blocks of the model, and which operations in them, are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launchers.engines.loop import sinks, wide_heads
from launchers.gang.job import TrainJob

_ATEN: Any = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default: 1, _ATEN.addmm.default: 2}  # index of the weight among the arguments
_QUANTIZED_PRODUCT = torch.ops.metaflow_finetune.quantized_product.default
_ATTENTION = (
    sinks.OPERATORS
    | {wide_heads.OPERATOR}
    | frozenset(
        getattr(_ATEN, f"_scaled_dot_product_{kind}").default
        for kind in (
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "flash_attention_for_cpu",
            "fused_attention_overrideable",
        )
    )
)


def recompute(blocks: Iterable[nn.Module], job: TrainJob) -> None:
    """Recompute every n-th block in the backward pass, or some of its operations, as the plan's layout says.

    Hooks around a block, which gather its weights, do not run again.
    """
    layout = job.plan.layout
    if not layout.activation_checkpointing:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if layout.recompute == "selective":
        rank = job.settings.lora.rank if job.plan.adapters else 0
        options["context_fn"] = partial(_selective_contexts, rank)
    for number, block in enumerate(blocks, 1):
        if number % layout.recompute_every == 0:
            block.forward = partial(checkpoint, block.forward, **options)


def _selective_contexts(adapter_rank: int) -> Any:
    """Save the results of attention and of every second product, like torchtitan's option "op".

    Products with an adapter's matrix, one of whose sides is the adapter's rank, are always recomputed.
    """
    counts = {True: 0, False: 0}  # products so far, by whether it is the recomputation

    def policy(context: Any, operation: Callable[..., Any], *values: Any, **_: Any) -> CheckpointPolicy:
        save = operation in _ATTENTION
        if operation == _QUANTIZED_PRODUCT or (
            operation in _PRODUCTS and min(values[_PRODUCTS[operation]].shape) > adapter_rank
        ):
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
