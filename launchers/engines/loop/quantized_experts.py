"""Frozen experts of mixture-of-experts models whose weights are stored in 4 or 8 bits, for any sharding.

transformers 5 keeps a block's experts in tensors [experts, rows, columns], not in linear layers, and its own
quantizers leave them in 16 bits. Here such a tensor is quantized as one matrix [experts * rows, columns].
bitsandbytes' ``replace_parameter_4bit`` is not used: autograd would keep the dequantized tensor until the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import library, nn

from estimator.errors import UserError
from estimator.vocabulary import LaunchedQuantization
from launchers.engines.loop import quantized
from launchers.engines.loop.quantized import BLOCK


class QuantizedExperts(nn.Module):
    """Experts of a block, combined with the family's class; a product dequantizes one tensor of all experts.

    A tensor's parameter is the column of :func:`quantized.packed`; its scales are buffers, named after it,
    which are not part of the state dict.
    """

    kind: LaunchedQuantization
    shapes: dict[str, torch.Size]
    """Shape of each quantized tensor by name: [experts, out, in], or [experts, in, out] in some families."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return each token's weighted sum over its experts, like transformers' grouped_mm_experts_forward.

        ``hidden_states``: [tokens, width]; ``top_k_index`` and ``top_k_weights``: [tokens, top k].
        """
        module: Any = self  # the family's class has the other attributes
        top_k = top_k_index.shape[-1]
        expert_ids, order = torch.sort(top_k_index.reshape(-1))
        experts = torch.arange(module.num_experts, device=expert_ids.device)
        ends = torch.searchsorted(expert_ids, experts, right=True).to(torch.int32)
        selected = hidden_states[order // top_k]
        if module.has_gate:
            values = module._apply_gate(self._products("gate_up_proj", selected, expert_ids, ends))
        else:
            values = module.act_fn(self._products("up_proj", selected, expert_ids, ends))
        values = self._products("down_proj", values, expert_ids, ends)
        if module.has_post_expert_norm:
            values = module.post_expert_norm(values)
        values = values * top_k_weights.reshape(-1)[order, None]
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        result: torch.Tensor = values[places].view(len(hidden_states), top_k, -1).sum(dim=1)
        return result.to(hidden_states.dtype)

    def _products(
        self, name: str, inputs: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        module: Any = self
        scales = self.scales(name)
        values: torch.Tensor = product(
            inputs,
            getattr(module, name),
            scales["absmax"],
            scales.get("absmax2"),
            ends,
            self.kind,
            list(self.shapes[name]),
            module.is_transposed,
        )
        return values + getattr(module, f"{name}_bias")[expert_ids] if module.has_bias else values

    def scales(self, name: str) -> quantized.Scales:
        """Return the scales of a tensor."""
        buffers = {kind: self._buffers.get(f"{name}_{kind}") for kind in quantized.SCALES}
        return {kind: buffer for kind, buffer in buffers.items() if buffer is not None}


@library.custom_op("metaflow_finetune::quantized_experts_product", mutates_args=())
def product(
    inputs: torch.Tensor,
    packed_weight: torch.Tensor,
    absmax: torch.Tensor,
    absmax2: torch.Tensor | None,
    ends: torch.Tensor,
    kind: str,
    shape: list[int],
    transposed: bool,
) -> torch.Tensor:
    """Compute each expert's ``inputs @ weight.T`` for its rows; ``inputs @ weight`` if ``transposed``.

    ``inputs``: rows sorted by expert; ``ends``: end of each expert's rows. A custom operator, so that
    autograd saves the quantized weight.
    """
    from transformers.integrations.moe import _grouped_mm

    scales = {"absmax": absmax} | ({} if absmax2 is None else {"absmax2": absmax2})
    matrix = torch.Size((shape[0] * shape[1], shape[2]))
    chosen: Any = kind  # custom operators take plain strings
    weight = quantized.unpacked(packed_weight.detach(), scales, chosen, matrix).view(shape)
    products: torch.Tensor = _grouped_mm(inputs, weight if transposed else weight.mT, offs=ends)
    return products


@product.register_fake
def _(
    inputs: torch.Tensor,
    _weight: Any,
    _absmax: Any,
    _absmax2: Any,
    _ends: Any,
    _kind: Any,
    shape: list[int],
    transposed: bool,
) -> torch.Tensor:
    return inputs.new_empty(inputs.shape[0], shape[2] if transposed else shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    _, packed_weight, absmax, absmax2, ends, ctx.kind, ctx.shape, ctx.transposed = inputs
    # Save the parameter, not a copy: ZeRO-3 and FSDP2 gather it again before the backward pass
    ctx.save_for_backward(packed_weight, absmax, absmax2, ends)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return product(gradient, *ctx.saved_tensors, ctx.kind, ctx.shape, not ctx.transposed), *[None] * 7


product.register_autograd(_backward, setup_context=_save_for_backward)


def replace(network: nn.Module, kind: LaunchedQuantization) -> None:
    """Turn each experts module into :class:`QuantizedExperts` with uninitialized weights."""
    classes: dict[type, type] = {}
    for module, tensors in _experts(network):
        family = type(module)
        if family not in classes:
            classes[family] = type(f"Quantized{family.__name__}", (QuantizedExperts, family), {})
        module.__class__ = classes[family]
        module.kind, module.shapes = kind, {name: weight.shape for name, weight in tensors.items()}
        for name, weight in tensors.items():
            empty, scales = quantized.empty_like(weight.flatten(end_dim=1), kind)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            for scale, values in scales.items():
                module.register_buffer(f"{name}_{scale}", values, persistent=False)


def round_weights(network: nn.Module, kind: LaunchedQuantization) -> None:
    """Replace the weights of all experts by their quantized and dequantized values."""
    for _, tensors in _experts(network):
        for weight in tensors.values():
            matrix = weight.data.flatten(end_dim=1)
            packed_weight, scales = quantized.packed(matrix, kind)
            weight.data = quantized.unpacked(packed_weight, scales, kind, matrix.shape).view(weight.shape)


def _experts(network: nn.Module) -> Iterator[tuple[Any, dict[str, nn.Parameter]]]:
    """Yield each experts module with its three-dimensional parameters.

    Those modules have the attributes that transformers' use_experts_implementation adds.
    """
    for module in list(network.modules()):
        if hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate"):
            tensors = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
            yield module, tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows of a quantized tensor that the base's files store as a separate tensor, such as one expert's."""

    module: QuantizedExperts
    tensor: str
    first_row: int

    def as_trained_on(self, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Quantize and dequantize these rows with the scales of the complete tensor."""
        module = self.module
        dtype = getattr(module, self.tensor).dtype
        matrix = weight.to(device, dtype).reshape(-1, weight.shape[-1])
        kind = "nf4" if module.kind == "nf4-double" else module.kind
        packed_weight, scales = quantized.packed(matrix, kind)
        if module.kind == "nf4-double":
            first = self.first_row * matrix.shape[1] // BLOCK
            blocks = quantized.plain_scales(module.scales(self.tensor))
            scales = {"absmax": blocks[first : first + matrix.numel() // BLOCK].to(device).view(torch.uint8)}
        return quantized.unpacked(packed_weight, scales, kind, matrix.shape).view(weight.shape).cpu()


def parts(network: Any) -> dict[str, Part]:
    """Map names of tensors in the base's files to their rows in quantized experts.

    Raises UserError if the files store a tensor transposed, or in parts of quantization blocks.
    """
    return {
        stored_name: Part(module=module, tensor=tensor, first_row=first_row)
        for name, module in network.named_modules()
        if isinstance(module, QuantizedExperts)
        for tensor, shape in module.shapes.items()
        for stored_name, first_row in _first_rows(network, name, tensor, shape).items()
    }


def _first_rows(network: Any, module: str, tensor: str, shape: torch.Size) -> dict[str, int]:
    """Map names in the base's files to the first row of a module's tensor that is stored there."""
    from transformers.core_model_loading import revert_weight_conversion

    name = f"{quantized.base_name(module)}.{tensor}"
    all_rows = torch.arange(prod(shape[:2])).view(*shape[:2], 1)
    first_rows = {}
    for stored_name, rows in revert_weight_conversion(network.get_base_model(), {name: all_rows}).items():
        first, count = int(rows.flatten()[0]), rows.numel()
        in_order = rows.shape[-1] == 1 and torch.equal(rows.flatten(), torch.arange(first, first + count))
        if not in_order or first * shape[2] % BLOCK or count * shape[2] % BLOCK:
            raise UserError(
                f"method qlora: {stored_name} of the base's files is not a range of complete blocks of "
                f"{BLOCK} values of {name}.",
                "Use --method lora.",
            )
        first_rows[stored_name] = first
    return first_rows
