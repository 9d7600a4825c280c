"""A config.json for a shape: what its publisher's file says, and what transformers builds it from."""

from __future__ import annotations

from typing import Any

from estimator.exact import hf_configuration
from estimator.models import ModelSpec

NEWER = (
    "granite",
    "olmo3",
    "smollm3",
    "ministral3",
    "glm4",
    "glm4_moe",
    "exaone4",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "seed_oss",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "nemotron_h",
    "granitemoehybrid",
    "gemma4_text",
    "mistral4",
    "lfm3",
)


def config_of(m: ModelSpec) -> dict[str, Any]:
    """A config.json of the model; fields that no parameter and no check depends on are left out."""
    if m.family in NEWER:
        return {"model_type": m.family} | hf_configuration.values(m, m.max_seq_len)
    special = {
        "mpt": _mpt,
        "gptj": _gptj,
        "falcon": _falcon,
        "qwen": _qwen,
        "bert": _bert,
        "gpt_neox": _neox,
    }.get(m.family)
    return {"model_type": m.family, "vocab_size": m.vocab} | (special(m) if special else _usual(m))


def _sizes(m: ModelSpec) -> dict[str, Any]:
    return {"hidden_size": m.hidden, "num_hidden_layers": m.layers, "num_attention_heads": m.heads}


def _usual(m: ModelSpec) -> dict[str, Any]:
    config: dict[str, Any] = _sizes(m) | {
        "num_key_value_heads": m.kv_heads,
        "intermediate_size": m.ffn,
        "max_position_embeddings": m.max_seq_len,
        "tie_word_embeddings": m.tied_embeddings,
        "rms_norm_eps": m.norm_eps,
        "pad_token_id": 0,
    }
    if not m.latent_attention and m.family != "phi":
        config["head_dim"] = m.head_dim
    return config | _window(m) | _latent(m) | _experts(m)


def _window(m: ModelSpec) -> dict[str, Any]:
    if m.family == "llama4_text":
        return {"attention_chunk_size": m.sliding_window}
    config: dict[str, Any] = {"sliding_window": m.sliding_window}
    return config | ({"use_sliding_window": False} if m.family.startswith("qwen") else {})


def _latent(m: ModelSpec) -> dict[str, Any]:
    if not m.latent_attention:
        return {}
    return {
        "q_lora_rank": m.q_lora_rank or None,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_nope_head_dim": m.qk_nope_head_dim,
        "qk_rope_head_dim": m.qk_rope_head_dim,
        "v_head_dim": m.v_head_dim,
    }


def _experts(m: ModelSpec) -> dict[str, Any]:
    if not m.experts:
        return {}
    config: dict[str, Any] = {"num_experts_per_tok": m.experts_per_token}
    if m.family.startswith("deepseek"):
        return config | {
            "n_routed_experts": m.experts,
            "n_shared_experts": m.shared_ffn // m.ffn,
            "moe_intermediate_size": m.ffn,
            "first_k_dense_replace": m.dense_layers,
            "intermediate_size": m.dense_ffn,
            "n_group": 1,
            "topk_group": 1,
        }
    if m.family == "llama4_text":
        every = m.layers // (m.layers - m.dense_layers)
        width = {"intermediate_size_mlp": m.dense_ffn or 16384, "interleave_moe_layer_step": every}
        return config | {"num_local_experts": m.experts} | width
    if m.family in ("qwen2_moe", "qwen3_moe"):
        shared = {"shared_expert_intermediate_size": m.shared_ffn} if m.shared_ffn else {}
        return config | {"num_experts": m.experts, "moe_intermediate_size": m.ffn} | shared
    return config | {"num_local_experts": m.experts}


def _mpt(m: ModelSpec) -> dict[str, Any]:
    return {
        "d_model": m.hidden,
        "n_layers": m.layers,
        "n_heads": m.heads,
        "expansion_ratio": m.ffn // m.hidden,
        "max_seq_len": m.max_seq_len,
        "no_bias": not m.mlp_bias,
    }


def _gptj(m: ModelSpec) -> dict[str, Any]:
    return {
        "n_embd": m.hidden,
        "n_layer": m.layers,
        "n_head": m.heads,
        "n_inner": None,
        "n_positions": m.max_seq_len,
        "rotary_dim": m.head_dim // 2,
        "tie_word_embeddings": False,
    }


def _falcon(m: ModelSpec) -> dict[str, Any]:
    return _sizes(m) | {"multi_query": m.kv_heads == 1, "parallel_attn": True, "bias": False}


def _qwen(m: ModelSpec) -> dict[str, Any]:
    return _sizes(m) | {
        "kv_channels": m.head_dim,
        "intermediate_size": 2 * m.ffn,
        "max_position_embeddings": m.max_seq_len,
        "no_bias": True,
        "tie_word_embeddings": False,
    }


def _bert(m: ModelSpec) -> dict[str, Any]:
    return _sizes(m) | {
        "intermediate_size": m.ffn,
        "max_position_embeddings": m.position_embeddings,
        "type_vocab_size": m.token_types,
    }


def _neox(m: ModelSpec) -> dict[str, Any]:
    return _sizes(m) | {
        "intermediate_size": m.ffn,
        "max_position_embeddings": m.max_seq_len,
        "tie_word_embeddings": m.tied_embeddings,
    }
