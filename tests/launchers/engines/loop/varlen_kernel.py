"""A CPU reference of the variable-length attention of torch, whose kernel needs CUDA."""

from __future__ import annotations

import itertools

import torch


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what ``torch.nn.attention.varlen.varlen_attn`` documents, one document at a time."""
    assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
    assert int(cu_seq_q[-1]) == len(query) == len(key) == len(value)
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_q == max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    window_left, right = window_size
    assert right == 0, "training is causal"
    outputs = []
    for first, last in itertools.pairwise(cu_seq_q.tolist()):
        place = torch.arange(last - first)
        distance = place[:, None] - place[None, :]
        mask = distance >= 0 if window_left < 0 else (distance >= 0) & (distance <= window_left)
        q, k, v = (each[first:last].transpose(0, 1) for each in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)
