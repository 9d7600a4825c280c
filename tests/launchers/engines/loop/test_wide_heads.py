"""Attention of heads wider than FlashAttention's, compared with torch's own on each document."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import library

from launchers.engines.loop import wide_heads
from tests.launchers.engines.loop import varlen_kernel

BOUNDARIES = (0, 7, 8, 41)
HEADS, WIDTH = 4, 264
MAX_LENGTH, SCALE = 64, 0.05


def inputs(key_heads: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(BOUNDARIES[-1], heads, WIDTH, **options).requires_grad_()
        for heads in (HEADS, key_heads, key_heads)
    ]


def lengths(device: str = "cpu") -> torch.Tensor:
    return torch.tensor(BOUNDARIES, dtype=torch.int32, device=device)


@pytest.mark.parametrize("key_heads", [1, 2, HEADS])
def test_result_and_gradients_equal_those_of_each_document(key_heads: int) -> None:
    results = []
    for kernel in (True, False):
        tensors = inputs(key_heads, dtype=torch.float64)
        if kernel:
            with varlen_kernel.registered():
                output, _ = wide_heads.wide_attention(*tensors, lengths(), MAX_LENGTH, SCALE)
                output.sin().sum().backward()
        else:
            parts = [
                torch.nn.functional.scaled_dot_product_attention(
                    *(each[first:last].transpose(0, 1) for each in tensors),
                    is_causal=True,
                    scale=SCALE,
                    enable_gqa=True,
                ).transpose(0, 1)
                for first, last in itertools.pairwise(BOUNDARIES)
            ]
            output = torch.cat(parts)
            output.sin().sum().backward()
        results.append([output, *(each.grad for each in tensors)])
    for mine, expected in zip(*results, strict=True):
        assert torch.allclose(mine, expected, atol=1e-6)  # the logsumexp is in fp32


def test_the_operator_keeps_its_contract_under_compilation() -> None:
    with varlen_kernel.registered():
        arguments = (*inputs(2), lengths(), MAX_LENGTH, SCALE)
        library.opcheck(wide_heads.OPERATOR, arguments)


def test_the_kernel_of_torch_accepts_the_arguments_and_agrees_on_shapes() -> None:
    """On the meta device, where torch checks its CUDA operators' schemas and shapes."""
    tensors = inputs(2, device="meta", dtype=torch.bfloat16)
    arguments = (*tensors, lengths("meta"), MAX_LENGTH, SCALE)
    found = wide_heads.wide_attention(*arguments)
    with torch.no_grad():
        expected = wide_heads.wide_attention._init_fn(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    schema = torch.ops.aten._efficient_attention_backward.default._schema
    assert [each.name for each in schema.arguments][:16] == [
        "grad_out_",
        "query",
        "key",
        "value",
        "bias",
        "out",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "logsumexp",
        "dropout_p",
        "philox_seed",
        "philox_offset",
        "custom_mask_type",
        "bias_requires_grad",
    ]
    found[0].sum().backward()
    assert all(each.grad is not None and each.grad.shape == each.shape for each in tensors)
