"""Small helpers on model shapes: a config.json for a shape, and the same model with fewer blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from estimator.exact import hf_configuration
from estimator.models import ModelSpec


def config_of(m: ModelSpec) -> dict[str, Any]:
    """Return a config.json of the model; fields that no parameter and no check depends on are left out."""
    config = {"model_type": m.family} | hf_configuration.values(m, m.max_seq_len)
    if m.family == "qwen":  # its file counts both halves of the gated MLP
        config["intermediate_size"] = 2 * m.ffn
    return config


def with_layers(m: ModelSpec, layers: int) -> ModelSpec:
    """Return the model with ``layers`` blocks, with dense and sliding-window ones in proportion."""
    dense = min(m.dense_layers, max(layers - 1, 0)) if m.dense_layers < m.layers else layers
    sliding = m.sliding_layers and max(1, round(layers * m.sliding_layers / m.layers))
    sparse = layers * m.index_layers // m.layers
    reused = min(layers * m.reused_kv_layers // m.layers, layers - 1)
    return replace(
        m,
        layers=layers,
        recurrent_layers=layers * m.recurrent_layers // m.layers,
        mlp_layers=layers * m.mlp_layers // m.layers,
        dense_layers=dense,
        sliding_layers=sliding,
        index_layers=sparse,
        heavy_layers=layers - sliding - sparse if m.compressed_attention else 0,
        reused_kv_layers=reused,
        reused_kv_sliding=min(sliding, layers * m.reused_kv_sliding // m.layers, reused),
        published_parameters=None,
        published_active_parameters=None,
    )
