"""Fields of config.json of compressed attention and hyper-connections (DeepSeek V4)."""

from __future__ import annotations

from typing import Any

from estimator.errors import UserError
from estimator.models.config_reader import ConfigReader

FAMILIES = ("deepseek_v4",)
_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATE = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}  # of compress_ratios


def kinds(reader: ConfigReader, layers: int) -> list[str]:
    """Return the kind of each block, by the rules of ``DeepseekV4Config`` (transformers 5.23.0)."""
    listed = reader.items("layer_types")
    rates = reader.items("compress_ratios")  # may have entries of multi-token prediction at the end
    if not listed and rates:
        unknown = sorted({str(rate) for rate in rates if rate not in _BY_RATE})
        if unknown:
            raise UserError(
                f"Model {reader.name}: config.json has compress_ratios with {', '.join(unknown)}; "
                f"supported are {', '.join(map(str, _BY_RATE))}."
            )
        listed = [_BY_RATE[rate] for rate in rates]
    if not listed:
        alternating = [_SPARSE if i % 2 else _HEAVY for i in range(layers)]
        listed = [_HEAVY, _HEAVY, *alternating]
    return [str(kind) for kind in listed[:layers]]


def fields(reader: ConfigReader, family: str, layers: int) -> dict[str, Any]:
    """Return compressed attention and hyper-connections as arguments of ModelSpec; empty for other models."""
    if family not in FAMILIES:
        return {}
    listed = kinds(reader, layers)
    rates = ConfigReader(reader.mapping("compress_rates"), reader.name)
    return {
        "sliding_window": reader.integer("sliding_window", default=128),
        "sliding_layers": listed.count(_SLIDING),
        "index_layers": listed.count(_SPARSE),
        "index_heads": reader.integer("index_n_heads", default=64),
        "index_head_dim": reader.integer("index_head_dim", default=128),
        "heavy_layers": listed.count(_HEAVY),
        "compress_rate": reader.integer("compress_rate_csa", default=rates.integer(_SPARSE, default=4)),
        "heavy_compress_rate": reader.integer(
            "compress_rate_hca", default=rates.integer(_HEAVY, default=128)
        ),
        "q_lora_rank": reader.integer("q_lora_rank", default=1024),
        "o_groups": reader.integer("o_groups", default=8),
        "o_lora_rank": reader.integer("o_lora_rank", default=1024),
        "residual_streams": reader.integer("hc_mult", default=4),
        "sinkhorn_iterations": reader.integer("hc_sinkhorn_iters", default=20),
    }
