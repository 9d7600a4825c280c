"""Variable-length attention with sinks: GPT-OSS's attention, by torch's FlashAttention kernel.

A sink is one more key of a head, with a learned score and value 0. It only changes the denominator of the
softmax, so that kernels without sinks serve: lse' = logaddexp(lse, sink), out' = out exp(lse - lse'). The
kernel's backward pass computes the probabilities as exp(score - lse) and delta = sum(gradient * out), which
are those of attention with sinks if it receives lse' and out'.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import library
from torch.nn.attention import varlen as kernel

CAUSAL = [-1, 0]  # window without a limit to the left
# torch 2.11 supports grouped queries without this argument, which newer releases need
_PARAMETERS = inspect.signature(kernel.varlen_attn).parameters
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}


@library.custom_op("metaflow_finetune::sink_attention", mutates_args=())
def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    scale: float,
    window: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's result, [tokens, heads, head_dim], and the logsumexp with sinks, [heads, tokens].

    The logsumexp is in fp32. ``query`` is [tokens, heads, head_dim], ``sinks`` is [heads]; ``key`` and
    ``value`` may have fewer heads.
    ``window``: previous and following tokens that a token attends to, as in ``varlen_attn``.
    """
    output, lse, _ = torch.ops.torch_attn._varlen_attn(
        query,
        key,
        value,
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        is_causal=window == CAUSAL,
        scale=scale,
        window_size=window,
        **GROUPED,
    )
    with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
    factors = torch.exp(lse - with_sinks).T[..., None]
    return torch.mul(output, factors, out=query.new_empty(query.shape)), with_sinks


@sink_attention.register_fake
def _(
    query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    _sinks: torch.Tensor,
    _cu_seq_lens: torch.Tensor,
    _max_length: int,
    _scale: float,
    _window: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.max_length, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(context: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, sinks, cu_seq_lens, output, lse = context.saved_tensors
    of_inputs = torch.ops.torch_attn._varlen_attn_backward(
        gradient,
        query,
        key,
        value,
        output,
        lse,
        cu_seq_lens,
        cu_seq_lens,
        context.max_length,
        context.max_length,
        is_causal=context.window == CAUSAL,
        rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),  # of dropout, which is 0
        scale=context.scale,
        window_size=context.window,
    )
    of_sinks = None
    if context.needs_input_grad[3]:
        delta = (gradient * output).sum(-1, dtype=torch.float32).T
        of_sinks = -(torch.exp(sinks.float()[:, None] - lse) * delta).sum(1).to(sinks.dtype)
    return *of_inputs, of_sinks, None, None, None, None


sink_attention.register_autograd(_gradients, setup_context=_save)
OPERATORS = frozenset(
    {torch.ops.torch_attn._varlen_attn.default, torch.ops.metaflow_finetune.sink_attention.default}
)
