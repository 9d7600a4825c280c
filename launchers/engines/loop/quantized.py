"""Frozen linear layers whose weights are stored in 4 or 8 bits, for any sharding.

bitsandbytes' layers are not used. Its product keeps the gathered weight from the forward to the backward pass
(0.50.2, MatMul4Bit: a view of it), so that ZeRO-3 would save no memory; on some CPUs it repacks weights in
evaluation mode; and its 8-bit layer keeps a second reference to the full weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import library, nn

from estimator.vocabulary import METHODS, LaunchedQuantization
from launchers.engines import _merge
from launchers.gang.job import TrainJob

Scales = dict[str, torch.Tensor]

# One scale per 64 weights; scales are quantized in groups of 256: Dettmers et al. 2023, QLoRA
# (arXiv:2305.14314), section 3; estimator/memory/states.py counts them.
BLOCK, SCALES_BLOCK = 64, 256
LARGEST_INT8 = 127
SCALES = ("absmax", "absmax2")  # names of the buffers


def kind_of(job: TrainJob) -> LaunchedQuantization | None:
    """Return the quantization of the job's base; None if it is not quantized."""
    return job.settings.lora.quantization if METHODS[job.plan.method].quantized else None


def packed(weight: torch.Tensor, kind: LaunchedQuantization) -> tuple[torch.Tensor, Scales]:
    """Quantize a matrix to 4 or 8 bits; return it as one column of the same type, and its scales as bytes.

    Packed into a floating-point type, the weight can be sharded, gathered and moved like any other. As bytes,
    the scales stay unchanged when a network is cast to another type.
    """
    if kind == "int8":
        values, largest = _int8(weight)
        scales = {"absmax": largest}
    else:
        from bitsandbytes import functional

        values, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=kind == "nf4-double", quant_type="nf4"
        )
        scales = {"absmax": state.absmax}
        if kind == "nf4-double":
            scales["absmax2"] = torch.cat([state.offset.reshape(1), state.state2.absmax])
    flat = values.reshape(-1).view(torch.uint8)
    padded = nn.functional.pad(flat, (0, -len(flat) % weight.element_size()))
    return padded.view(weight.dtype)[:, None], {name: _as_bytes(scale) for name, scale in scales.items()}


def unpacked(
    packed_weight: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    kind: LaunchedQuantization,
    shape: torch.Size,
) -> torch.Tensor:
    """Invert :func:`packed`: dequantize a matrix of this shape to the type of ``packed_weight``."""
    count = prod(shape)
    values = packed_weight.reshape(-1).view(torch.uint8)
    if kind == "int8":
        int8 = values[:count].view(torch.int8).view(shape).to(packed_weight.dtype)
        return int8.mul_(scales["absmax"].view(torch.float32)[:, None] / LARGEST_INT8)
    from bitsandbytes import functional

    # Rows of one block: bitsandbytes' CPU kernel (0.50.2) begins a block in each row, unlike its quantization
    rows = torch.Size((1, count) if count % BLOCK else (count // BLOCK, BLOCK))
    state = functional.QuantState(
        plain_scales(scales), shape=rows, dtype=packed_weight.dtype, blocksize=BLOCK, quant_type="nf4"
    )
    dequantized: torch.Tensor = functional.dequantize_4bit(values[: -(-count // 2)], state).view(shape)
    return dequantized


def plain_scales(scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the fp32 scale of each block of 4-bit weights; dequantize it if it is stored in 8 bits."""
    absmax = scales["absmax"]
    if "absmax2" not in scales:
        return absmax.view(torch.float32)
    from bitsandbytes import functional

    absmax2 = scales["absmax2"].view(torch.float32)  # the first value is the mean of all scales
    plain: torch.Tensor = functional.dequantize_blockwise(
        absmax, absmax=absmax2[1:], code=_dynamic_code(absmax.device), blocksize=SCALES_BLOCK
    )
    return plain.add_(absmax2[0])


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by its largest absolute value: Dettmers et al. 2022 (arXiv:2208.07339), section 2.1.

    Computes in fp32, one block of rows at a time.
    """
    largest = torch.linalg.vector_norm(weight, ord=float("inf"), dim=1, dtype=torch.float32)
    factor = LARGEST_INT8 / largest.clamp(min=torch.finfo(torch.float32).tiny)
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for rows in _merge.blocks(weight):
        values[rows] = (weight[rows].float() * factor[rows, None]).round_().to(torch.int8)
    return values, largest


@lru_cache(maxsize=8)
def _dynamic_code(device: torch.device) -> torch.Tensor:
    """Return the value of each code of an 8-bit scale: bitsandbytes' dynamic map (arXiv:1511.04561)."""
    from bitsandbytes import functional

    code: torch.Tensor = functional.create_dynamic_map()
    return code.to(device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class QuantizedLinear(nn.Linear):
    """Frozen linear layer that dequantizes its weight for each product, and again for the product's gradient.

    ``weight`` is the column of :func:`packed`, the buffers ``absmax`` and ``absmax2`` are the scales. The
    buffers are not part of the state dict, because they follow from the base's files.
    """

    absmax: torch.Tensor
    absmax2: torch.Tensor | None

    def __init__(self, like: nn.Linear, kind: LaunchedQuantization) -> None:
        """Create an uninitialized layer with the shape, type and device of ``like``.

        Scales are allocated on the CPU if ``like`` is on the meta device.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = like.in_features, like.out_features, kind
        self.bias = like.bias
        empty, scales = empty_like(like.weight, kind)
        self.weight = nn.Parameter(empty, requires_grad=False)
        for name in SCALES:
            self.register_buffer(name, scales.get(name), persistent=False)

    def whole(self) -> torch.Tensor:
        """Return the dequantized weight [out, in], which the adapter is trained on."""
        return _weight(self.in_features, self.weight, self.absmax, self.absmax2, self.kind, self.out_features)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(
            inputs, self.weight, self.absmax, self.absmax2, self.kind, self.out_features
        )
        return result if self.bias is None else result + self.bias


def empty_like(weight: torch.Tensor, kind: LaunchedQuantization) -> tuple[torch.Tensor, Scales]:
    """Allocate what :func:`packed` returns for a matrix of this shape, type and device.

    Scales are allocated on the CPU if ``weight`` is on the meta device.
    """
    count = weight.numel()
    packed_count = -(-(count if kind == "int8" else -(-count // 2)) // weight.element_size())
    column = torch.empty((packed_count, 1), dtype=weight.dtype, device=weight.device)
    device = torch.device("cpu") if weight.is_meta else weight.device
    lengths = _scale_bytes(len(weight), count, kind)
    return column, {name: torch.empty(n, dtype=torch.uint8, device=device) for name, n in lengths.items()}


def _scale_bytes(rows: int, count: int, kind: LaunchedQuantization) -> dict[str, int]:
    """Return the bytes of each buffer of scales, for a matrix with this number of rows and values."""
    if kind == "int8":
        return {"absmax": 4 * rows}
    blocks = -(-count // BLOCK)
    if kind == "nf4":
        return {"absmax": 4 * blocks}
    return {"absmax": blocks, "absmax2": 4 * (1 + -(-blocks // SCALES_BLOCK))}


@library.custom_op("metaflow_finetune::quantized_product", mutates_args=())
def product(
    inputs: torch.Tensor,
    packed_weight: torch.Tensor,
    absmax: torch.Tensor,
    absmax2: torch.Tensor | None,
    kind: str,
    out_features: int,
) -> torch.Tensor:
    """Compute ``inputs @ weight.T`` for a quantized weight [out_features, in_features].

    A custom operator, as torch.compile would otherwise save the dequantized weight for the backward pass.
    """
    weight = _weight(inputs.shape[-1], packed_weight, absmax, absmax2, kind, out_features)
    return nn.functional.linear(inputs, weight)


@library.custom_op("metaflow_finetune::quantized_product_backward", mutates_args=())
def _product_backward(
    gradient: torch.Tensor,
    packed_weight: torch.Tensor,
    absmax: torch.Tensor,
    absmax2: torch.Tensor | None,
    kind: str,
    in_features: int,
) -> torch.Tensor:
    """Compute the gradient of :func:`product` with respect to its inputs: ``gradient @ weight``."""
    return gradient @ _weight(in_features, packed_weight, absmax, absmax2, kind, gradient.shape[-1])


@product.register_fake
@_product_backward.register_fake
def _(values: torch.Tensor, _weight: Any, _absmax: Any, _absmax2: Any, _kind: str, features: int) -> Any:
    return values.new_empty(*values.shape[:-1], features)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    values, packed_weight, absmax, absmax2, ctx.kind, _ = inputs
    ctx.in_features = values.shape[-1]
    # Save the parameter, not a copy: ZeRO-3 and FSDP2 gather it again before the backward pass
    ctx.save_for_backward(packed_weight, absmax, absmax2)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _product_backward(gradient, *ctx.saved_tensors, ctx.kind, ctx.in_features), *[None] * 5


product.register_autograd(_backward, setup_context=_save_for_backward)


def _weight(
    in_features: int,
    packed_weight: torch.Tensor,
    absmax: torch.Tensor,
    absmax2: torch.Tensor | None,
    kind: Any,
    out_features: int,
) -> torch.Tensor:
    scales = {"absmax": absmax} | ({} if absmax2 is None else {"absmax2": absmax2})
    return unpacked(packed_weight.detach(), scales, kind, torch.Size((out_features, in_features)))


def base_name(name: str) -> str:
    """Return a PEFT layer's name in its base model."""
    return name.removeprefix("base_model.model.").removesuffix(".base_layer")
