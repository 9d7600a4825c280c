"""CPU references of torch's variable-length attention, whose kernels need CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import varlen as kernel

from launchers.engines.loop import wide_heads
from launchers.engines.loop.wide_heads import BLOCK, CAUSAL_MASK


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, window: tuple[int, int] | list[int]
) -> torch.Tensor:
    """Return one document's masked scores, [heads, tokens, tokens]; ``query``: [heads, tokens, width]."""
    window_left, right = window
    assert right == 0, "training is causal"
    place = torch.arange(query.shape[1])
    distance = place[:, None] - place[None, :]
    mask = (distance >= 0) & ((distance <= window_left) | (window_left < 0))
    return (query @ key.mT * scale).masked_fill(~mask, float("-inf"))


def _documents(cu_seq: torch.Tensor, *tensors: torch.Tensor, groups: int) -> Iterator[list[torch.Tensor]]:
    """Iterate over the documents of [tokens, heads, width] tensors: [heads, tokens, width], all heads."""
    for first, last in itertools.pairwise(cu_seq.tolist()):
        parts = [each[first:last].transpose(0, 1) for each in tensors]
        yield [
            each if len(each) == len(parts[0]) else each.repeat_interleave(groups, dim=0) for each in parts
        ]


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] | list[int] | None = None,
    enable_gqa: bool = False,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what ``torch_attn::_varlen_attn`` returns: result, logsumexp and random state."""
    window = (-1, -1) if window_size is None else tuple(window_size)
    assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
    assert int(cu_seq_q[-1]) == len(query) == len(key) == len(value)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_q == max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert is_causal == (window == (-1, 0))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs, sums = [], []
    groups = query.shape[1] // key.shape[1]
    for q, k, v in _documents(cu_seq_q, query, key, value, groups=groups):
        scores = _scores(q, k, scale, (window[0], window[1]))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.float().logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1), torch.zeros(2, dtype=torch.uint64)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    _cu_seq_k: torch.Tensor,
    _max_q: int,
    _max_k: int,
    is_causal: bool,
    _rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute what FlashAttention does: probabilities from ``lse``, their row sums from ``output``.

    Dao et al. 2022 (arXiv:2205.14135), algorithm 4; ``torch_attn::_varlen_attn_backward``.
    """
    window = window_size or [-1, -1]
    assert is_causal == (window == [-1, 0])
    assert lse.shape == (query.shape[1], len(query))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    calls = []
    tensors = (query, key, value, gradient, output, lse.T[..., None])
    for q, k, v, d, o, log_sum in _documents(cu_seq_q, *tensors, groups=groups):
        shares = (_scores(q, k, scale, window) - log_sum).exp().to(q.dtype)
        of_scores = shares * (d @ v.mT - (d * o).sum(-1, keepdim=True)) * scale
        of_keys, of_values = (
            each.view(-1, groups, *each.shape[1:]).sum(1) for each in (of_scores.mT @ q, shares.mT @ d)
        )
        calls.append([each.transpose(0, 1) for each in (of_scores @ k, of_keys, of_values)])
    return tuple(torch.cat(each) for each in zip(*calls, strict=True))


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *lengths: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what ``torch.nn.attention.varlen.varlen_attn`` documents; differentiable."""
    causal = window_size == (-1, 0)
    return forward(query, key, value, *lengths, causal, scale, window_size, enable_gqa)[0]


def memory_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    mask_type: int,
    with_lse: bool,
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Compute what ``aten::_efficient_attention_forward`` does with cumulative lengths."""
    assert (bias, dropout, mask_type, with_lse) == (None, 0.0, CAUSAL_MASK, True)
    assert query.shape == key.shape == value.shape
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    output, lse, _ = forward(query[0], key[0], value[0], *lengths, True, scale, (-1, 0))
    parts = torch.split(lse, cu_seq_q.diff().tolist(), dim=1)
    length = -(-max_q // BLOCK) * BLOCK
    padded = torch.stack([torch.nn.functional.pad(each, (0, length - each.shape[1])) for each in parts])
    return output[None], padded


def memory_efficient_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _bias: None,
    output: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    lse: torch.Tensor,
    *others: Any,
    scale: float,
) -> tuple[torch.Tensor | None, ...]:
    """Compute what ``aten::_efficient_attention_backward`` does with cumulative lengths."""
    assert (others[0], *others[3:]) == (0.0, CAUSAL_MASK, False)
    joined = torch.cat(
        [each[:, :length] for each, length in zip(lse, cu_seq_q.diff().tolist(), strict=True)], dim=1
    )
    gradients = backward(
        gradient[0],
        query[0],
        key[0],
        value[0],
        output[0],
        joined,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        True,
        joined,  # no random state
        scale,
        [-1, 0],
    )
    return *(each[None] for each in gradients), None


@contextmanager
def registered() -> Iterator[None]:
    """Use the references for torch's CUDA operators on CPUs."""
    with (
        mock.patch.object(wide_heads, "FORWARD", memory_efficient),
        mock.patch.object(wide_heads, "BACKWARD", memory_efficient_backward),
        kernel._varlen_attn.set_kernel_enabled("cpu"),
        kernel._varlen_attn_backward.set_kernel_enabled("cpu"),
    ):
        kernel._varlen_attn.register_kernel("cpu")(forward)
        kernel._varlen_attn_backward.register_kernel("cpu")(backward)
        yield
