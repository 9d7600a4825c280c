"""Variable-length attention with heads wider than FlashAttention's 256, by torch's memory-efficient kernel.

Two operators, because the kernel's derivative cannot be compiled (torch 2.13, _meta_registrations.py:
meta__efficient_attention_backward lacks an argument).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import library

FORWARD: Any = torch.ops.aten._efficient_attention_forward
BACKWARD: Any = torch.ops.aten._efficient_attention_backward
CAUSAL_MASK = 1  # the kernel's custom_mask_type
BLOCK = 32  # the logsumexp's length is a multiple of this


def _repeated(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Repeat heads of keys and values for all query heads, as the kernel has no grouped queries."""
    return [each.repeat_interleave(query.shape[1] // each.shape[1], dim=1)[None] for each in tensors]


@library.custom_op("metaflow_finetune::wide_attention", mutates_args=())
def wide_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of causal attention within each document, and the kernel's logsumexp.

    ``query`` is [tokens, heads, head_dim]; ``key`` and ``value`` may have fewer heads.
    """
    output, lse, *_ = FORWARD(
        query[None],
        *_repeated(query, key, value),
        None,  # bias
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        0.0,  # dropout
        CAUSAL_MASK,
        True,  # with the logsumexp
        scale=scale,
    )
    return output[0], lse


@wide_attention.register_fake
def _(
    query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    _scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    documents, length = cu_seq_lens.shape[0] - 1, -(-max_length // BLOCK) * BLOCK
    lse = query.new_empty(documents, query.shape[1], length, dtype=torch.float32)
    return query.new_empty(query.shape), lse


@library.custom_op("metaflow_finetune::wide_attention_backward", mutates_args=())
def wide_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # random state of dropout, which is 0
    of_query, *others, _ = BACKWARD(
        gradient[None],
        query[None],
        *_repeated(query, key, value),
        None,  # bias
        output[None],
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        lse,
        0.0,  # dropout
        unused,
        unused,
        CAUSAL_MASK,
        False,  # no gradient of a bias
        scale=scale,
    )
    groups = query.shape[1] // key.shape[1]
    of_key, of_value = (each[0].unflatten(1, (-1, groups)).sum(2) for each in others)
    return of_query[0], of_key, of_value


@wide_attention_backward.register_fake
def _(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, of_key, of_value = (each.new_empty(each.shape) for each in (query, key, value))
    return of_query, of_key, of_value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.max_length, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, cu_seq_lens, output, lse = ctx.saved_tensors
    gradients = wide_attention_backward(
        gradient, query, key, value, output, lse, cu_seq_lens, ctx.max_length, ctx.scale
    )
    return *gradients, None, None, None


wide_attention.register_autograd(_gradients, setup_context=_save)
OPERATOR = torch.ops.metaflow_finetune.wide_attention.default
