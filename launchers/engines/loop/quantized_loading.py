"""Loading of a model whose weights are quantized one by one, by transformers' interface for quantizers.

So at most one matrix, or one tensor of a block's experts, exists in 16 bits at a time. transformers' own
quantizers create bitsandbytes' layers; ``quantized.py`` explains why those are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from estimator.vocabulary import LaunchedQuantization
from launchers.engines.loop.quantized import QuantizedLinear, Scales, packed
from launchers.engines.loop.quantized_experts import QuantizedExperts
from launchers.engines.loop.quantized_model import replace_layers

METHOD = "metaflow-finetune"


@register_quantization_config(METHOD)
class LoopQuantization(QuantizationConfigMixin):  # type: ignore[misc,unused-ignore]
    """Argument of ``from_pretrained(quantization_config=...)``: the kind, and the device that quantizes."""

    def __init__(self, kind: LaunchedQuantization, device: torch.device) -> None:
        super().__init__(quant_method=METHOD)
        self.kind, self.device = kind, device


@register_quantizer(METHOD)
class LoopQuantizer(HfQuantizer):  # type: ignore[misc,unused-ignore]
    """Replaces the linear layers before the weights are loaded, and quantizes each weight when it is read."""

    is_trainable = True

    def __init__(self, quantization_config: LoopQuantization, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.scales: dict[str, Scales] = {}  # by name of the weight

    def is_serializable(self) -> bool:
        return False  # the layers are never saved: exports use the base's files

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        owner, _dot, name = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        if isinstance(layer, QuantizedExperts):
            return name in layer.shapes
        return name == "weight" and isinstance(layer, QuantizedLinear)

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        replace_layers(model, self.quantization_config.kind)

    def get_quantize_ops(self) -> _Pack:
        return _Pack(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        for name, scales in self.scales.items():
            owner, _dot, weight = name.rpartition(".")
            prefix = "" if weight == "weight" else f"{weight}_"
            for kind, values in scales.items():
                model.get_submodule(owner).register_buffer(f"{prefix}{kind}", values, persistent=False)
        self.remove_quantization_config(model)  # transformers then treats it as unquantized


class _Pack(ConversionOps):  # type: ignore[misc,unused-ignore]
    """Quantizes one weight when it is read. Its scales become buffers after all weights are loaded.

    transformers moves a model's buffers off the meta device only after the weights.
    """

    def __init__(self, quantizer: LoopQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", **_: Any
    ) -> dict[str, nn.Parameter]:
        (tensors,) = input_dict.values()
        weight = tensors[0] if isinstance(tensors, list) else tensors
        config = self._quantizer.quantization_config
        matrix = weight if weight.ndim == 2 else weight.flatten(end_dim=-2)
        packed_weight, scales = packed(matrix.to(config.device), config.kind)
        self._quantizer.scales[full_layer_name] = {
            name: values.to(weight.device) for name, values in scales.items()
        }
        return {full_layer_name: nn.Parameter(packed_weight.to(weight.device), requires_grad=False)}
