"""Attention sinks with the variable-length kernel, compared with transformers' own code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import library

from launchers.engines.loop import sinks, varlen
from tests.launchers.engines.loop import varlen_kernel

BOUNDARIES = (0, 7, 8, 21)
HEADS, KEY_HEADS, WIDTH = 4, 2, 8
SHAPES = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS}


@pytest.fixture
def _operator() -> Iterator[None]:
    with varlen_kernel.registered():
        yield


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(1, heads, BOUNDARIES[-1], WIDTH, generator=generator, dtype=torch.float64)
        for name, heads in SHAPES.items()
    }
    tensors["s_aux"] = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    return {name: each.to(device, dtype).requires_grad_() for name, each in tensors.items()}


def attention(tensors: dict[str, torch.Tensor], window: int | None) -> torch.Tensor:
    device = tensors["query"].device
    return varlen.attention(
        None,
        tensors["query"],
        tensors["key"],
        tensors["value"],
        None,
        cu_seq_lens_q=torch.tensor(BOUNDARIES, dtype=torch.int32, device=device),
        max_length_q=16,
        scaling=0.3,
        sliding_window=window,
        s_aux=tensors["s_aux"],
    )[0]


def eager(tensors: dict[str, torch.Tensor], window: int | None) -> torch.Tensor:
    """Compute attention of each document with transformers' code of GPT-OSS."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, sinks=tensors["s_aux"], training=True)
    outputs = []
    for first, last in itertools.pairwise(BOUNDARIES):
        place = torch.arange(last - first)
        distance = place[:, None] - place[None, :]
        hidden = (distance < 0) | (distance >= (window or last))
        mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
        parts = (tensors[name][:, :, first:last] for name in SHAPES)
        outputs.append(eager_attention_forward(module, *parts, mask[None, None], scaling=0.3)[0])
    return torch.cat(outputs, dim=1)


@pytest.mark.usefixtures("_operator")
@pytest.mark.parametrize("window", [None, 4])
def test_result_and_gradients_equal_those_of_transformers(window: int | None) -> None:
    results = []
    for function in (attention, eager):
        tensors = inputs()
        output = function(tensors, window)
        weights = torch.arange(output.numel(), dtype=torch.float64).sin().view(output.shape)
        (output * weights).sum().backward()
        results.append({"output": output} | {name: each.grad for name, each in tensors.items()})
    mine, expected = results
    for name, value in expected.items():
        assert value is not None
        assert torch.allclose(mine[name], value, atol=1e-6), name  # the logsumexp is in fp32


@pytest.mark.usefixtures("_operator")
def test_the_operator_keeps_its_contract_under_compilation() -> None:
    tensors = inputs(dtype=torch.float32)
    flat = [tensors[name].detach().transpose(1, 2).flatten(0, 1).requires_grad_() for name in SHAPES]
    lengths = torch.tensor(BOUNDARIES, dtype=torch.int32)
    arguments: tuple[Any, ...] = (*flat, tensors["s_aux"], lengths, 16, 0.3, [-1, 0])
    library.opcheck(torch.ops.metaflow_finetune.sink_attention.default, arguments)


@pytest.mark.usefixtures("_operator")
def test_frozen_sinks_get_no_gradient() -> None:
    tensors = inputs()
    tensors["s_aux"].requires_grad_(False)
    attention(tensors, None).sum().backward()
    assert tensors["s_aux"].grad is None
    assert tensors["query"].grad is not None


def test_the_operators_of_torch_accept_the_arguments_and_agree_on_shapes() -> None:
    """On the meta device, where torch checks its CUDA operators' schemas and shapes."""
    tensors = inputs("meta", torch.bfloat16)
    output = attention(tensors, 4)
    output.sum().backward()
    assert output.shape == (1, BOUNDARIES[-1], HEADS, WIDTH)
    assert all(each.grad is not None and each.grad.shape == each.shape for each in tensors.values())
    flat = [tensors[name].transpose(1, 2).flatten(0, 1) for name in SHAPES]
    lengths = torch.tensor(BOUNDARIES, dtype=torch.int32, device="meta")
    with torch.no_grad():
        result, lse = sinks.sink_attention._init_fn(*flat, tensors["s_aux"], lengths, 16, 0.3, [-1, 0])
        kernel_result, kernel_lse, *_ = torch.ops.aten._flash_attention_forward(
            *flat, lengths, lengths, 16, 16, 0.0, True, False, scale=0.3
        )
    assert (result.shape, result.dtype) == (kernel_result.shape, kernel_result.dtype)
    assert (lse.shape, lse.dtype) == (kernel_lse.shape, kernel_lse.dtype)
