"""Recurrent blocks of a config.json: which they are, and their widths."""

from __future__ import annotations

from typing import Any

from estimator.models.architectures import family_of
from estimator.models.config_reader import ConfigReader

# Nemotron-H's hybrid_override_pattern, one letter for each block
_LETTERS = {"M": "recurrent", "*": "full_attention", "-": "mlp", "E": "moe"}
_ATTENTION = ("full_attention", "attention", "sliding_attention")
_WIDTHS: dict[str, dict[str, tuple[str, ...]]] = {
    "gated-delta": {
        "recurrent_heads": ("linear_num_value_heads",),
        "recurrent_head_dim": ("linear_value_head_dim",),
        "recurrent_groups": ("linear_num_key_heads",),
        "recurrent_state": ("linear_key_head_dim",),
        "conv_kernel": ("linear_conv_kernel_dim",),
    },
    "mamba2": {
        "recurrent_heads": ("mamba_num_heads", "mamba_n_heads"),
        "recurrent_head_dim": ("mamba_head_dim", "mamba_d_head"),
        "recurrent_groups": ("n_groups", "mamba_n_groups"),
        "recurrent_state": ("ssm_state_size", "mamba_d_state"),
        "conv_kernel": ("conv_kernel", "mamba_d_conv"),
    },
    "short-conv": {"conv_kernel": ("conv_L_cache",)},
}


def kinds(reader: ConfigReader) -> list[str]:
    """Return the kind of each block: "full_attention", "mlp", "moe", or a recurrence; empty if not listed."""
    pattern = reader.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    return [str(kind) for kind in reader.items("layers_block_type") or reader.items("layer_types")]


def fields(reader: ConfigReader, family: str, layers: int) -> dict[str, Any]:
    """Return the shape of recurrent blocks as keyword arguments of ModelSpec; empty if a family has none."""
    recurrence = family_of(family).recurrence
    if not recurrence:
        return {}
    listed = kinds(reader) or (lfm3_kinds(layers) if family == "lfm3" else [])
    if listed:
        count = sum(kind not in (*_ATTENTION, "mlp", "moe") for kind in listed)
    elif family == "lfm2":
        count = layers - len(reader.items("full_attn_idxs")) if reader.items("full_attn_idxs") else 0
    elif recurrence == "gated-delta":
        count = layers - layers // reader.integer("full_attention_interval", default=4)
    else:
        count = layers
    shape: dict[str, Any] = {"recurrent_layers": count}
    if count:
        shape |= {name: reader.integer(*names) for name, names in _WIDTHS[recurrence].items()}
    if family_of(family).one_part_blocks:
        shape["mlp_layers"] = sum(kind in ("mlp", "moe") for kind in listed)
    return shape


def lfm3_kinds(layers: int) -> list[str]:
    """Return the kinds of LFM3's blocks if config.json lists none (Lfm3Config, transformers 5.23.0)."""
    period = ["sliding_attention", "conv", "full_attention", "conv"]
    return ["conv", *(period * layers)[1:layers]]


def has_experts(reader: ConfigReader, family: str) -> bool:
    """Whether a model of a family with and without experts has them."""
    if family == "nemotron_h":
        return "moe" in kinds(reader)
    if family == "gemma4_text":
        return bool(reader.get("enable_moe_block"))
    return bool(reader.get("num_local_experts"))


def lfm2_width(reader: ConfigReader) -> int:
    """Return the width of LFM2's MLP, which its code derives from that in config.json (Lfm2MLP)."""
    width = reader.integer("block_ff_dim", "intermediate_size")
    if reader.get("block_auto_adjust_ff_dim", True) is False:
        return width
    width = int((reader.number("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    multiple = reader.integer("block_multiple_of", default=256)
    return multiple * -(-width // multiple)
