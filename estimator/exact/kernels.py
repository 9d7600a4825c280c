"""Fake GPU kernels that save other tensors than the CPU implementations. They only allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from estimator.exact.support import torchtune_modules
from estimator.setup import Setup

# torchao's NF4Tensor, as torchtune uses it (torchao/dtypes/nf4tensor.py): 4 bits per weight, an int8 scale
# per block of 64 weights, an fp32 factor per 256 scales.
NF4_BLOCK, NF4_SCALER_BLOCK = 64, 256


class FusedRmsNorm(torch.autograd.Function):
    """Fake aten::_fused_rms_norm, which CUDA uses if input and weight have the same type.

    The real kernel saves the input and one fp32 number per row (aten/src/ATen/native/layer_norm.cpp).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class EfficientAttention(torch.autograd.Function):
    """Fake aten::_scaled_dot_product_efficient_attention, which GPUs use where no CPU kernel applies.

    It saves queries, keys, values, the result and the fp32 logsumexp of each head
    (aten/src/ATen/native/transformers/cuda/attention.cu).
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query.new_empty(*query.shape[:1], *query.shape[2:0:-1], value.shape[-1]).transpose(1, 2)
        logsumexp = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, logsumexp)
        return result

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class Nf4Product(torch.autograd.Function):
    """Fake linear_nf4 of torchao, which unpacks the weight for each product and frees it afterwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.width = x.shape[-1]
        weight = _unpacked(packed, ctx.width, x.dtype)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ _unpacked(packed, ctx.width, gradients[0].dtype), None


def linear_nf4(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torchao's name
    """Replace torchao's ``linear_nf4`` by :class:`Nf4Product`."""
    return Nf4Product.apply(input, weight)  # type: ignore[no-any-return, no-untyped-call]


def to_nf4(weight: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return a tensor with the bytes of the weight in 4 bits.

    It has the type of the weight, as integers cannot be parameters, and shape [bytes / element size, 1]. The
    single column marks packed weights: no linear layer has one input.
    """
    return torch.empty(weight.numel() // (2 * weight.element_size()), 1, dtype=weight.dtype)


def _is_packed(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and parameter.shape[1] == 1


def weights_in(parameter: torch.Tensor) -> int:
    """Count the weights of a parameter, packed in 4 bits or not."""
    return parameter.numel() * (2 * parameter.element_size() if _is_packed(parameter) else 1)


def nf4_scale_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of the scales of a tensor of ``to_nf4``; 0 for any other."""
    if not _is_packed(parameter):
        return 0
    weights = weights_in(parameter)
    return weights // NF4_BLOCK + 4 * (weights // (NF4_BLOCK * NF4_SCALER_BLOCK))


def _unpacked(packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(weights_in(packed) // width, width, dtype=dtype)


@contextmanager
def as_on_gpu(setup: Setup) -> Iterator[None]:
    """Context in which fake CPU tensors save the tensors that the device of the setup would save."""
    with ExitStack() as stack:
        # Compiled code has no separate norm kernel, on the GPU either
        if setup.device == "cuda" and not setup.compile:
            original = torch.nn.functional.rms_norm
            stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", _rms_norm(original)))
        if setup.device == "cpu":  # reads the step count, which a fake tensor does not have
            for module in ("torch.optim.adam", "torch.optim.adamw"):
                stack.enter_context(mock.patch(f"{module}._get_value", return_value=1.0, create=True))
        if not torchtune_modules(setup):
            # transformers builds a mask if it cannot read positions; unpacked rows need none
            masks = "transformers.masking_utils"
            stack.enter_context(mock.patch(f"{masks}.is_tracing", return_value=False, create=True))
            stack.enter_context(mock.patch(f"{masks}.find_packed_sequence_indices", return_value=None))
            functional = torch.nn.functional
            attention = _attention(functional.scaled_dot_product_attention)
            if setup.device == "cuda":
                stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
                stack.enter_context(mock.patch.object(functional, "dropout", _dropout(functional.dropout)))
        elif setup.quantization != "none":
            for module in ("lora", "dora"):
                target = f"torchtune.modules.peft.{module}"
                stack.enter_context(mock.patch(f"{target}.to_nf4", to_nf4))
                stack.enter_context(mock.patch(f"{target}.linear_nf4", linear_nf4))
            stack.enter_context(mock.patch("torch.utils.swap_tensors", _swap_weight))
            target = "torchtune.modules.low_precision.nf4_linear"
            stack.enter_context(mock.patch(f"{target}.to_nf4", to_nf4))
            stack.enter_context(mock.patch(f"{target}.linear_nf4", linear_nf4))
        yield


def _swap_weight(old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a weight as torch.utils.swap_tensors does, which does not accept fake tensors."""
    old.requires_grad_(False)
    old.data = new.data


def _dropout(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the fused dropout of GPUs, which saves a mask of one byte per element."""

    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if inplace or not training or not p:
            return original(x, p, training, inplace)
        return torch.native_dropout(x, p, training)[0]

    return dropout


def _attention(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return attention that saves no scores with dropout, or values of another width than the keys."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, **options: Any
    ) -> torch.Tensor:
        if not dropout_p and query.shape[-1] == value.shape[-1]:
            return original(query, key, value, **options)
        return EfficientAttention.apply(query, key, value)  # type: ignore[no-any-return, no-untyped-call]

    return attention


def _rms_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rms_norm(
        input: torch.Tensor,  # noqa: A002 - torch's name
        normalized_shape: Any,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is not None and weight.dtype == input.dtype:
            return FusedRmsNorm.apply(input, weight)  # type: ignore[no-any-return, no-untyped-call]
        return original(input, normalized_shape, weight, eps)

    return rms_norm
