"""Checkpoints in published quantized formats, converted once for training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from estimator.errors import UserError
from estimator.models import hf_config, locate
from launchers.models import causal, dequantize, published, tiny_llama, weights
from launchers.models.fit import check_fits
from tests.launchers.engines.loop import families

Tensors = dict[str, torch.Tensor]
TOKENS = torch.arange(3, 40)[None]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GENERATOR = torch.Generator().manual_seed(7)


def random_integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def mxfp4(tensors: Tensors, name: str) -> torch.Tensor:
    """Two 4-bit floats per byte, low half first; 32 values along the input share a power of two."""
    experts, into, out = tensors.pop(name).shape
    codes = random_integers(16, experts, out, into // 32, 32)
    scales = random_integers(6, experts, out, into // 32) + 122
    tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    tensors[f"{name}_scales"] = scales.to(torch.uint8)
    full_weight = E2M1[codes] * 2.0 ** (scales[..., None] - 127)
    return full_weight.reshape(experts, out, into).transpose(1, 2)


def fp8(tensors: Tensors, name: str) -> torch.Tensor:
    """One scale for each block of 32 x 32 values; the last blocks are smaller."""
    weight = tensors.pop(name)
    rows, columns = (-(-size // 32) for size in weight.shape)
    scales = 0.5 + torch.rand(rows, columns, generator=GENERATOR)
    codes = (weight / weight.abs().max()).to(torch.float8_e4m3fn)
    tensors[name] = codes
    tensors[f"{name}_scale_inv"] = scales
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return codes.float() * spread[: weight.shape[0], : weight.shape[1]]


GROUP = 32


def fp4(tensors: Tensors, name: str) -> torch.Tensor:
    """The format of DeepSeek V4: experts in 4-bit floats with a scale for 32 of them, the rest in FP8."""
    scale = name.removesuffix("weight") + "scale"
    if ".experts." not in name:
        full_weight = fp8(tensors, name)
        tensors[scale] = tensors.pop(f"{name}_scale_inv")
        return full_weight
    out, into = tensors.pop(name).shape
    codes = random_integers(16, out, into)
    exponents = random_integers(6, out, into // GROUP) - 5
    tensors[name] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    tensors[scale] = (2.0**exponents).to(torch.float8_e8m0fnu)
    return E2M1[codes] * 2.0 ** exponents.repeat_interleave(GROUP, 1)


def integers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [in, out], zero points and scales [in / 32, out], and the dequantized weight."""
    out, into = weight.shape
    codes, zeros = random_integers(16, into, out), random_integers(15, into // GROUP, out) + 1
    scales = (0.01 + 0.02 * torch.rand(into // GROUP, out, generator=GENERATOR)).half()
    spread = [each.repeat_interleave(GROUP, 0) for each in (zeros, scales.float())]
    return codes, zeros, scales, ((codes - spread[0]) * spread[1]).T


def packed(codes: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Pack eight neighbors of a row into one int32, ``order[i]`` in its i-th half byte."""
    rows, columns = codes.shape
    eights = codes.reshape(rows, columns // 8, 8).to(torch.int64)
    word = sum(eights[:, :, place] << 4 * i for i, place in enumerate(order))
    return torch.as_tensor(word).to(torch.uint32).view(torch.int32)


def awq(tensors: Tensors, name: str) -> torch.Tensor:
    codes, zeros, scales, full_integers = integers(tensors.pop(name))
    order, module = [0, 2, 4, 6, 1, 3, 5, 7], name.removesuffix(".weight")
    tensors |= {
        f"{module}.qweight": packed(codes, order),
        f"{module}.qzeros": packed(zeros, order),
        f"{module}.scales": scales,
    }
    return full_integers


def gptq(tensors: Tensors, name: str) -> torch.Tensor:
    codes, zeros, scales, full_integers = integers(tensors.pop(name))
    order, module = list(range(8)), name.removesuffix(".weight")
    tensors |= {
        f"{module}.qweight": packed(codes.T.contiguous(), order).T.contiguous(),
        f"{module}.qzeros": packed(zeros - 1, order),
        f"{module}.scales": scales,
        f"{module}.g_idx": (torch.arange(codes.shape[0]) // GROUP).to(torch.int32),
    }
    return full_integers


def packed_integers(tensors: Tensors, name: str) -> torch.Tensor:
    weight, module = tensors.pop(name), name.removesuffix(".weight")
    codes = random_integers(16, *weight.shape)
    scales = (0.01 + 0.02 * torch.rand(weight.shape[0], weight.shape[1] // GROUP, generator=GENERATOR)).half()
    tensors |= {
        f"{module}.weight_packed": packed(codes, list(range(8))),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    return (codes - 8) * scales.float().repeat_interleave(GROUP, 1)


def nf4(tensors: Tensors, name: str) -> torch.Tensor:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = tensors.pop(name)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    tensors[name] = codes
    tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    full_weight: torch.Tensor = functional.dequantize_4bit(codes, state)
    return full_weight


def int8(tensors: Tensors, name: str) -> torch.Tensor:
    weight = tensors.pop(name)
    scales = weight.abs().amax(1)
    tensors[name] = (weight / scales[:, None] * 127).round().to(torch.int8)
    tensors[name.removesuffix("weight") + "SCB"] = scales
    return tensors[name].float() * scales[:, None] / 127


PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}},
}
FORMATS: dict[
    str, tuple[str, str | tuple[str, ...], Callable[[Tensors, str], torch.Tensor], dict[str, Any]]
] = {
    "mxfp4": ("gpt_oss", "_proj", mxfp4, {"quant_method": "mxfp4"}),
    "fp8": ("deepseek_v3", "_proj.weight", fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp4": (
        "deepseek_v4",
        ("w1.weight", "w2.weight", "w3.weight", "wq_a.weight", "wkv.weight", "wo_b.weight"),
        fp4,
        {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"},
    ),
    "awq": ("llama", "_proj.weight", awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": ("llama", "_proj.weight", gptq, {"quant_method": "gptq", "bits": 4}),
    "compressed-tensors": ("llama", "_proj.weight", packed_integers, PACKED),
    "nf4": ("llama", "_proj.weight", nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int8": ("llama", "_proj.weight", int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def with_tokenizer(folder: Path) -> Path:
    """Add the tokenizer of tiny-llama."""
    llama = tiny_llama.make(folder.parent / "tiny-llama")
    for path in llama.glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    return folder


def quantized(kind: str, folder: Path) -> tuple[Path, Any]:
    """A tiny published checkpoint in two files, and the model with its dequantized weights."""
    family, suffix, quantize, options = FORMATS[kind]
    model = families.network(family, intermediate_size=96 if family != "llama" else 128)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    names = [n for n in tensors if n.endswith(suffix) and (family != "gpt_oss" or ".experts." in n)]
    cloned = {name: tensors[name].clone() for name in tensors}
    for name in names:
        cloned[name] = quantize(tensors, name).contiguous()
    save_file({n: t.to(torch.bfloat16) for n, t in cloned.items()}, folder / "model.safetensors")
    expected = causal.load(folder, dtype=torch.float32).eval()
    (folder / "model.safetensors").unlink()
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]  # scales in another file than their weights
    weight_map = {}
    for number, part in enumerate(halves, start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": options}
    (folder / "config.json").write_text(json.dumps(config))
    return with_tokenizer(folder), expected


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits_found: torch.Tensor = model(input_ids=TOKENS).logits
    return logits_found


FAST = "fp8"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == FAST else [pytest.mark.slow]) for kind in FORMATS]
)
def test_a_quantized_checkpoint_is_dequantized_to_its_bf16_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = quantized(kind, tmp_path / "published")
    monkeypatch.setattr(published, "SHARD_BYTES", 100_000)  # so that there are several
    converted = weights.fetch(locate(str(folder)), tmp_path / "cache" / "model")
    check_fits(converted)
    model = causal.load(converted, dtype=torch.float32).eval()
    assert (logits(model) - logits(expected)).abs().max() < families.SAME
    files = list(converted.glob("*.safetensors"))
    assert len(files) > 1
    types = {t.dtype for path in files for t in load_file(path).values() if t.is_floating_point()}
    assert types == {torch.bfloat16}
    config = json.loads((converted / "config.json").read_text())
    assert "quantization_config" not in config
    assert "to bf16, once" in capsys.readouterr().out
    assert weights.fetch(locate(str(folder)), tmp_path / "cache" / "model") == converted
    assert "to bf16" not in capsys.readouterr().out, "it was converted already"


@pytest.mark.parametrize(
    "changes",
    [{"symmetric": False}, {"actorder": "group"}, {"num_bits": 3}, {"format": "nvfp4-pack-quantized"}],
)
def test_packed_integers_of_another_layout_are_refused(changes: dict[str, Any]) -> None:
    options = {"format": changes.pop("format", "pack-quantized")}
    options |= {"config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True} | changes}}}
    parts = {
        ".weight_packed": torch.zeros(2, 4, dtype=torch.int32),
        ".weight_scale": torch.ones(2, 1),
    }
    with pytest.raises(UserError, match="compressed-tensors weights"):
        dequantize.dequantize("compressed-tensors", options, parts)


def test_quantization_options_inside_the_text_config_are_read() -> None:
    config = {"model_type": "kimi_k25", "text_config": {"quantization_config": {"quant_method": "fp8"}}}
    assert published.quantization_of(config) == "fp8"
    assert hf_config.needs_conversion(config)


def test_the_converted_size_follows_from_the_published_files_and_their_format(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    for method, expected in (("fp8", 2000), ("bitsandbytes_4bit", 3555), ("awq", 3849), (None, 1000)):
        config = {} if method is None else {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert published.bf16_bytes(tmp_path) == expected, method


def test_an_unsupported_quantization_format_is_named_with_the_supported_ones() -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(UserError, match=r"quant_method hqq\)\. Supported formats: mxfp4, fp8, fp4, awq"):
        hf_config.to_spec(config, "mine")


# ---------------------------------------------------------------------------------------------------------
# Language models of multimodal checkpoints

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vision_config": _VISION | {"image_size": 28, "patch_size": 14}}),
    "llama4": (
        "llama4_text",
        {"vision_config": _VISION | {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}},
    ),
    "qwen3_vl": ("qwen3_vl_text", {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}}),
    "mistral3": ("mistral", {"vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_only_the_language_model_of_a_multimodal_checkpoint_is_trained(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, values = MULTIMODAL[family]
    torch.manual_seed(0)
    shape = (families.FAMILIES | families.UNTRIED | {"qwen3_vl_text": families.FAMILIES["qwen3"]})[text]
    values = values | {"text_config": {"model_type": text} | shape}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **values)).bfloat16().eval()
    model.save_pretrained(tmp_path / "published")
    model = type(model).from_pretrained(tmp_path / "published", dtype=torch.float32).eval()
    folder = with_tokenizer(tmp_path / "published")
    converted = weights.fetch(locate(str(folder)), tmp_path / "cache" / "model")
    check_fits(converted)
    alone = causal.load(converted, dtype=torch.float32).eval()
    assert type(alone).__name__ != type(model).__name__
    assert (logits(alone) - logits(model)).abs().max() < families.SAME
    spec = hf_config.to_spec(json.loads((folder / "config.json").read_text()), "mine")
    assert spec.sees_images
    assert spec.parameters == sum(parameter.numel() for parameter in alone.parameters())
