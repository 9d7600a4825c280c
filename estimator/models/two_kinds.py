"""Fields of config.json of families whose attention differs from block to block (Gemma 4)."""

from __future__ import annotations

from typing import Any

from estimator.errors import UserError
from estimator.models.config_reader import ConfigReader

FAMILIES = ("gemma4_text",)
_PERIOD = 6  # every sixth block has no window, unless layer_types lists them


def kinds(reader: ConfigReader, layers: int) -> list[str]:
    """Return the kind of each block, "sliding_attention" or "full_attention"; the last one is always full."""
    listed = [str(kind) for kind in reader.items("layer_types")]
    if not listed:
        listed = ["full_attention" if i % _PERIOD == 0 else "sliding_attention" for i in range(1, layers + 1)]
    return [*listed[:-1], "full_attention"]


def fields(reader: ConfigReader, family: str, layers: int, ffn: int) -> dict[str, Any]:
    """Return the shape of both kinds of blocks and of per-layer embeddings as arguments of ModelSpec.

    Follows ``Gemma4TextConfig`` and ``Gemma4TextAttention`` (transformers 5.23.0). Empty for other families.
    """
    if family not in FAMILIES:
        return {}
    kind_of_blocks = kinds(reader, layers)
    first = kind_of_blocks.index("full_attention")
    override = ConfigReader(reader.mapping("per_layer_config").get(str(first)) or {}, reader.name)
    keys_are_values = bool(reader.get("attention_k_eq_v"))
    heads = override.integer("num_key_value_heads", default=0, least=0)
    if keys_are_values and not heads:
        heads = reader.integer("num_global_key_value_heads", default=0, least=0)
    shape: dict[str, Any] = {
        "global_head_dim": override.integer(
            "head_dim", default=reader.integer("global_head_dim", default=512)
        ),
        "global_kv_heads": heads,
        "global_keys_are_values": keys_are_values,
    }
    reused = reader.integer("num_kv_shared_layers", default=0, least=0)
    if reused:
        last = kind_of_blocks[-reused:]
        shape |= {"reused_kv_layers": reused, "reused_kv_sliding": last.count("sliding_attention")}
        if reader.get("use_double_wide_mlp"):
            shape["reused_kv_ffn"] = 2 * ffn
    width = reader.integer("hidden_size_per_layer_input", default=256, least=0)
    if width:
        rows = reader.integer("vocab_size_per_layer_input", default=262_144)
        shape |= {"layer_embedding": width, "layer_vocab": rows}
    if reader.get("use_bidirectional_attention") == "all":
        raise UserError(
            f"Model {reader.name}: config.json has use_bidirectional_attention = all: it is an encoder."
        )
    return shape
