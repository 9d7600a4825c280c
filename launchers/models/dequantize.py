"""Dequantization, on the CPU, of the formats in which quantized weights are published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from launchers.base.imports import collector_paused

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]

# Suffixes of the tensors that make up one weight, by format. The name of the weight ends with _WEIGHT instead
# of the first suffix
_PARTS: dict[str, tuple[str, ...]] = {
    "mxfp4": ("_blocks", "_scales"),
    "fp8": (".weight", ".weight_scale_inv"),
    "fp4": (".weight", ".scale"),
    "awq": (".qweight", ".qzeros", ".scales"),
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "compressed-tensors": (".weight_packed", ".weight_scale"),
    "bitsandbytes": (".weight",),
}
_WEIGHT = {method: "" if method == "mxfp4" else ".weight" for method in _PARTS}
_UNUSED = {
    "fp8": (
        ".activation_scale",
        ".input_scale",
    ),  # scales of static activation quantization, which training does not use
    "compressed-tensors": (".weight_shape",),
}


def groups(method: str, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Group stored tensors by the weight they belong to: (weight name, suffix -> name of the stored tensor).

    ``method``: quantization method. ``names``: names of all stored tensors. A weight that is not quantized
    has a single part with the suffix "".
    """
    stored = sorted(names)
    present = set(stored)
    suffixes = _PARTS.get(method, ())
    grouped: set[str] = set()
    for name in stored:
        if method == "bitsandbytes":
            parts = _bnb_parts(name, stored, present)
        else:
            base = name.removesuffix(suffixes[0]) if suffixes and name.endswith(suffixes[0]) else None
            parts = {s: base + s for s in suffixes if base is not None and base + s in present}
        if len(parts) > 1:
            grouped |= set(parts.values())
            yield name.removesuffix(suffixes[0]) + _WEIGHT[method], parts
    for name in stored:
        if name not in grouped and not name.endswith(_UNUSED.get(method, ("\0",))):
            yield name, {"": name}


def _bnb_parts(name: str, stored: Iterable[str], present: set[str]) -> dict[str, str]:
    """Return the parts of a bitsandbytes weight: in 4 bits ``NAME.absmax`` etc., in 8 bits ``MODULE.SCB``."""
    if not name.endswith(".weight"):
        return {}
    if f"{name}.absmax" in present:
        prefix = f"{name}."
        return {"weight": name} | {
            tensor.removeprefix(prefix): tensor for tensor in stored if tensor.startswith(prefix)
        }
    scales = name.removesuffix("weight") + "SCB"
    return {"weight": name, "SCB": scales} if scales in present else {}


def dequantize(method: str, options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize one weight from its parts; ``options`` are config.json's ``quantization_config``."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return _METHODS[method](options, parts)


def _mxfp4(_options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize MXFP4: blocks of FP4 values with shared scales."""
    with collector_paused():
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights: torch.Tensor = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"])
    return weights


def _fp8(options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize FP8 with one scale per block or per tensor."""
    import torch

    with collector_paused():
        from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    scales = parts[".weight_scale_inv"]
    block = options.get("weight_block_size") if scales.ndim else None
    weights: torch.Tensor = _dequantize_fp8_weight(parts[".weight"], scales, block, torch.float32)
    return weights


def _fp4(options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize DeepSeek V4: experts in FP4 (two values per byte), other weights in FP8 with block scales.

    FP4 weights have one scale per 32 columns.
    """
    import torch

    weight, scales = parts[".weight"], parts[".scale"].float()
    if weight.dtype != torch.int8:
        return _fp8(options, {".weight": weight, ".weight_scale_inv": scales})
    with collector_paused():
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weights: torch.Tensor = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    return weights


def _awq(options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize AWQ in its gemm layout: qweight [in, out / 8], eight interleaved columns per int32."""
    bits = int(options.get("bits", options.get("w_bit", 4)))
    if bits != 4 or str(options.get("version", "gemm")).lower() != "gemm":
        raise UserError(
            f"AWQ weights with {bits} bits, version {options.get('version')!r}, are not supported."
        )
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    weights, zeros = (_unpack(parts[name], 4, order) for name in (".qweight", ".qzeros"))
    scales = parts[".scales"].float()
    group = weights.shape[0] // scales.shape[0]
    scaled = (weights - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
    return scaled.T


def _gptq(options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize GPTQ: qweight [in / 8, out] with 4 bits; format "gptq" stores zero points minus one."""
    bits = int(options.get("bits", 4))
    if bits not in (2, 4, 8):
        raise UserError(f"GPTQ weights with {bits} bits are not supported, only 2, 4 and 8 bits.")
    order = list(range(32 // bits))
    weights = _unpack(parts[".qweight"].T.contiguous(), bits, order).T
    zeros = _unpack(parts[".qzeros"], bits, order)
    if options.get("checkpoint_format", "gptq") == "gptq":
        zeros = zeros + 1
    groups_of_rows = parts[".g_idx"].long()
    scales = parts[".scales"].float()
    dequantized: torch.Tensor = ((weights - zeros[groups_of_rows]) * scales[groups_of_rows]).T
    return dequantized


def _compressed_tensors(options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize compressed-tensors' pack-quantized layout: weight_packed [out, in * bits / 32], symmetric.

    Integers are stored with an offset of half their range; each group of columns, or each row, has a scale.
    """
    groups = [dict(group) for group in dict(options.get("config_groups") or {}).values()]
    weights = [dict(group.get("weights") or {}) for group in groups]
    formats = {str(options.get("format"))} | {str(group["format"]) for group in groups if group.get("format")}
    widths = {int(weight.get("num_bits") or 0) for weight in weights}
    symmetric = all(weight.get("symmetric", True) for weight in weights)
    reordered = any(weight.get("actorder") == "group" for weight in weights)
    width = widths.pop() if len(widths) == 1 else 0
    if formats != {"pack-quantized"} or width not in (4, 8) or not symmetric or reordered:
        raise UserError(
            f"compressed-tensors weights of format {', '.join(sorted(formats))} are not supported, only "
            "pack-quantized ones of a single width (4 or 8 bits), symmetric and not reordered.",
            "Start from the unquantized model.",
        )
    codes = _unpack(parts[".weight_packed"], width, list(range(32 // width))) - 2 ** (width - 1)
    scales = parts[".weight_scale"].float()
    dequantized: torch.Tensor = codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return dequantized


def _unpack(packed: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Unpack int32 [rows, columns] to float32 [rows, columns * 32 / bits].

    ``order``: position of each unpacked value in the int32, in units of ``bits``.
    """
    import torch

    shifts = torch.tensor(order, dtype=torch.int32) * bits
    values: torch.Tensor = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return values.flatten(1).float()


def _bitsandbytes(_options: Mapping[str, Any], parts: Tensors) -> torch.Tensor:
    """Dequantize weights of bitsandbytes in 8 bits, or in 4 bits if the package is installed."""
    import torch

    if "SCB" in parts:
        return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]
    try:
        with collector_paused():
            from bitsandbytes.functional import QuantState, dequantize_4bit
    except ImportError:
        raise UserError(
            "These weights are in bitsandbytes' 4 bits, and bitsandbytes is not installed here.",
            "pip install bitsandbytes",
        ) from None
    state = QuantState.from_dict(
        {name: tensor for name, tensor in parts.items() if name != "weight"}, device=torch.device("cpu")
    )
    weights: torch.Tensor = dequantize_4bit(parts["weight"], state)
    return weights


_METHODS: dict[str, Callable[[Mapping[str, Any], Tensors], torch.Tensor]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fp4": _fp4,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}
