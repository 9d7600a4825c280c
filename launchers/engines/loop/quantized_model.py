"""Quantization of a model's linear layers and experts, and the values that its adapters were trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from estimator.vocabulary import LaunchedQuantization
from launchers.engines.loop import quantized_experts
from launchers.engines.loop.quantized import QuantizedLinear, base_name, packed, unpacked
from launchers.engines.reward_head import HEAD

Change = Callable[[str, torch.Tensor], torch.Tensor]


def replace_layers(network: Any, kind: LaunchedQuantization) -> None:
    """Replace each linear layer except the head by a :class:`QuantizedLinear`, and quantize experts."""
    quantized_experts.replace(network, kind)
    for name, layer in _quantized_layers(network):
        network.set_submodule(name, QuantizedLinear(layer, kind))


def round_layers(network: Any, kind: LaunchedQuantization) -> None:
    """Replace weights of experts and linear layers except the head by quantized and dequantized values."""
    quantized_experts.round_weights(network, kind)
    for _, layer in _quantized_layers(network):
        packed_weight, scales = packed(layer.weight.detach(), kind)
        layer.weight.data = unpacked(packed_weight, scales, kind, layer.weight.shape)


def _quantized_layers(network: Any) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers except heads and those with custom products (DeepSeek V4's groups)."""
    heads = (network.get_output_embeddings(), getattr(network, HEAD, None))
    return [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not hasattr(module, "n_groups")
        if all(module is not head for head in heads)
    ]


def as_trained_on(
    network: nn.Module,
    device: torch.device,
    names_in_files: Callable[[Iterable[str]], dict[str, str]],
) -> Change:
    """Return a function that gives a base weight the values that the adapter was trained on.

    ``names_in_files``: maps names of weights in the model to their names in the base's files.

    It quantizes the weight as at loading, on the same device, and dequantizes it. The layers' own weights are
    not used, because a rank may hold only a shard of each.
    """
    modules = ((name, m) for name, m in network.named_modules() if isinstance(m, QuantizedLinear))
    layers = {f"{base_name(name)}.weight": layer for name, layer in modules}
    layers = {stored: layers[name] for name, stored in names_in_files(layers).items()}
    parts = quantized_experts.parts(network)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if (part := parts.get(name)) is not None:
            return part.as_trained_on(weight, device)
        layer = layers.get(name)
        if layer is None:
            return weight
        packed_weight, scales = packed(weight.to(device, layer.weight.dtype), layer.kind)
        return unpacked(packed_weight, scales, layer.kind, weight.shape).cpu()

    return change


def unchanged(name: str, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - a Change
    """Return the weight unchanged."""
    return weight
