"""Hugging Face configuration values of a model shape, for every family that transformers can build."""

from __future__ import annotations

from typing import Any

from estimator.models import ModelSpec

# Families with other field names, and their names of the fields of a shape
OTHER_NAMES: dict[str, dict[str, str]] = {
    "gptj": {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "max_seq_len": "n_positions"},
    "mpt": {"hidden": "d_model", "layers": "n_layers", "heads": "n_heads", "max_seq_len": "max_seq_len"},
}


# Have latent attention and experts in DeepSeek's names
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # attention
INDEX_TOPK = 2048  # tokens that sparse attention selects, in both families
LIKE_DEEPSEEK = (
    *SPARSE,
    "deepseek_v4",
    "deepseek_v2",
    "deepseek_v3",
    "mistral4",
    "glm4_moe",
    "glm4_moe_lite",
)
WITHOUT_HEAD_DIM = ("phi", "gpt_neox", "falcon", "granite", "olmo3", "smollm3", "ernie4_5_moe")
# Have attention_bias for queries, keys and values
WITH_ATTENTION_BIAS = ("glm4", "glm4_moe", "seed_oss")


def values(spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """Return the keyword arguments of ``AutoConfig.for_model(family, ...)`` for the shape of a model.

    ``seq_len`` raises the number of positions if the model supports fewer.
    """
    common: dict[str, Any] = {"vocab_size": spec.vocab, "use_cache": False}
    if spec.family in OTHER_NAMES:
        names = OTHER_NAMES[spec.family]
        shape = {hf_name: getattr(spec, name) for name, hf_name in names.items()}
        shape[names["max_seq_len"]] = max(spec.max_seq_len, seq_len)
        return common | shape | _family_specific(spec)
    base: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": max(spec.max_seq_len, seq_len),
        "tie_word_embeddings": spec.tied_embeddings,
        "pad_token_id": 0,
    }
    if spec.family != "falcon":
        base |= {
            "num_key_value_heads": spec.kv_heads,
            "intermediate_size": spec.ffn,
            "rms_norm_eps": spec.norm_eps,
        }
    if not spec.latent_attention and spec.family not in WITHOUT_HEAD_DIM:
        base["head_dim"] = spec.head_dim
    if spec.recurrence:
        base |= _recurrent(spec)
    return (
        common
        | base
        | _window(spec)
        | _biases(spec)
        | _latent(spec)
        | _experts(spec)
        | _family_specific(spec)
    )


def _family_specific(spec: ModelSpec) -> dict[str, Any]:
    """Return the configuration values that only one family needs."""
    if spec.family == "gptj":
        return {"rotary_dim": spec.head_dim // 2, "n_inner": None, "tie_word_embeddings": False}
    if spec.family == "mpt":
        return {"expansion_ratio": spec.ffn // spec.hidden, "no_bias": not spec.mlp_bias}
    if spec.family == "glm4_moe":
        return {"use_qk_norm": spec.qk_norm == "head"}
    if spec.family == "gemma4_text":
        return _gemma4(spec)
    if spec.family in (*SPARSE, "glm4_moe_lite"):
        return _sparse(spec)
    if spec.compressed_attention:
        return _compressed(spec)
    if spec.family == "falcon":
        return {
            "multi_query": spec.kv_heads == 1,
            "new_decoder_architecture": 1 < spec.kv_heads < spec.heads,
            "num_kv_heads": spec.kv_heads,
            "num_ln_in_parallel_attn": spec.norms_per_layer if spec.parallel_residual else None,
            "parallel_attn": spec.parallel_residual,
            "ffn_hidden_size": spec.ffn,
            "bias": spec.qkv_bias,
        }
    return {}


def _sparse(spec: ModelSpec) -> dict[str, Any]:
    """Return the kinds of MLPs, and the indexers of sparse attention."""
    kinds = ["dense"] * spec.dense_layers + ["sparse"] * (spec.layers - spec.dense_layers)
    config: dict[str, Any] = {"mlp_layer_types": kinds}
    if spec.family in SPARSE:
        config |= {"index_n_heads": spec.index_heads, "index_head_dim": spec.index_head_dim}
        config["index_topk"] = INDEX_TOPK
    if spec.family == "glm_moe_dsa":
        rest = spec.layers - spec.index_layers
        config["indexer_types"] = ["full"] * spec.index_layers + ["shared"] * rest
    return config


def _compressed(spec: ModelSpec) -> dict[str, Any]:
    """Return DeepSeek V4's fields; blocks with the window alone precede those with an indexer."""
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    kinds = ["sliding_attention"] * spec.sliding_layers
    kinds += [sparse] * spec.index_layers + [heavy] * spec.heavy_layers
    return {
        "layer_types": kinds,
        "compress_rates": {sparse: spec.compress_rate, heavy: spec.heavy_compress_rate},
        "q_lora_rank": spec.q_lora_rank,
        "o_groups": spec.o_groups,
        "o_lora_rank": spec.o_lora_rank,
        "index_n_heads": spec.index_heads,
        "index_head_dim": spec.index_head_dim,
        "hc_mult": spec.residual_streams,
        "hc_sinkhorn_iters": spec.sinkhorn_iterations,
    }


def _gemma4(spec: ModelSpec) -> dict[str, Any]:
    """Return Gemma 4's fields; within each group, blocks with the window precede those without."""
    kinds: list[str] = []
    full = spec.layers - spec.sliding_layers
    reused_full = spec.reused_kv_layers - spec.reused_kv_sliding
    for sliding_count, full_count in (
        (spec.sliding_layers - spec.reused_kv_sliding, full - reused_full),
        (spec.reused_kv_sliding, reused_full),
    ):
        kinds += ["sliding_attention"] * sliding_count + ["full_attention"] * full_count
    config: dict[str, Any] = {
        "layer_types": kinds,
        "global_head_dim": spec.global_head_dim,
        "num_global_key_value_heads": spec.global_kv_heads or None,
        "attention_k_eq_v": spec.global_keys_are_values,
        "num_kv_shared_layers": spec.reused_kv_layers,
        "use_double_wide_mlp": bool(spec.reused_kv_ffn),
        "hidden_size_per_layer_input": spec.layer_embedding,
        "vocab_size_per_layer_input": spec.layer_vocab or spec.vocab,
    }
    if spec.experts:
        config |= {
            "enable_moe_block": True,
            "num_experts": spec.experts,
            "top_k_experts": spec.experts_per_token,
            "moe_intermediate_size": spec.ffn,
            "intermediate_size": spec.shared_ffn,
        }
    return config


def _window(spec: ModelSpec) -> dict[str, Any]:
    if spec.family == "llama4_text":
        rotary = [1] * spec.sliding_layers + [0] * (spec.layers - spec.sliding_layers)
        normed = spec.qk_norm == "unweighted"
        window = {"attention_chunk_size": spec.sliding_window, "use_qk_norm": normed}
        return window | {"no_rope_layers": rotary}
    if spec.recurrence:
        return {}
    if spec.family.startswith("qwen"):
        return {"sliding_window": spec.sliding_window, "use_sliding_window": False}
    if spec.family == "exaone4":  # its class divides by the period, which is 0 without a window
        kinds = ["sliding_attention"] * spec.sliding_layers
        kinds += ["full_attention"] * (spec.layers - spec.sliding_layers)
        return {"sliding_window": spec.sliding_window, "layer_types": kinds}
    return {"sliding_window": spec.sliding_window}


def _recurrent(spec: ModelSpec) -> dict[str, Any]:
    """Fields of recurrent blocks; all of them precede attention, which precedes plain MLPs."""
    kinds = ["linear_attention"] * spec.recurrent_layers + ["full_attention"] * spec.attention_layers
    widths: dict[str, Any] = {}
    if spec.recurrence == "gated-delta":
        widths = {
            "linear_num_value_heads": spec.recurrent_heads,
            "linear_value_head_dim": spec.recurrent_head_dim,
            "linear_num_key_heads": spec.recurrent_groups,
            "linear_key_head_dim": spec.recurrent_state,
            "linear_conv_kernel_dim": spec.conv_kernel,
        }
    elif spec.family == "lfm3":
        kinds = ["conv"] * spec.recurrent_layers + ["sliding_attention"] * spec.sliding_layers
        kinds += ["full_attention"] * (spec.attention_layers - spec.sliding_layers)
        window = {"sliding_window": spec.sliding_window, "use_sandwich_norm": spec.norms_per_layer == 4}
        gates = {"use_attention_gate": spec.head_gates}
        return {"conv_L_cache": spec.conv_kernel, "layer_types": kinds} | window | gates
    elif spec.recurrence == "short-conv":
        kinds = ["conv"] * spec.recurrent_layers + ["full_attention"] * spec.attention_layers
        return {"conv_L_cache": spec.conv_kernel, "block_auto_adjust_ff_dim": False, "layer_types": kinds}
    elif spec.family == "nemotron_h":
        kinds += ["moe"] * spec.expert_layers + ["mlp"] * (spec.mlp_layers - spec.expert_layers)
        return {
            "mamba_num_heads": spec.recurrent_heads,
            "mamba_head_dim": spec.recurrent_head_dim,
            "n_groups": spec.recurrent_groups,
            "ssm_state_size": spec.recurrent_state,
            "conv_kernel": spec.conv_kernel,
            "intermediate_size": spec.dense_ffn or spec.ffn,
            "layers_block_type": kinds,
        }
    else:
        widths = {
            "shared_intermediate_size": spec.shared_ffn or spec.ffn,
            "num_local_experts": spec.experts,
        }
        if spec.recurrent_layers:
            widths |= {
                "mamba_n_heads": spec.recurrent_heads,
                "mamba_d_head": spec.recurrent_head_dim,
                "mamba_n_groups": spec.recurrent_groups,
                "mamba_d_state": spec.recurrent_state,
                "mamba_d_conv": spec.conv_kernel,
                "mamba_expand": spec.recurrent_heads * spec.recurrent_head_dim // spec.hidden,
            }
    return widths | {"layer_types": kinds}


def _biases(spec: ModelSpec) -> dict[str, Any]:
    if spec.family in WITH_ATTENTION_BIAS:
        return {"attention_bias": spec.qkv_bias}
    return {"use_bias": spec.qkv_bias} if spec.family in ("ernie4_5", "ernie4_5_moe") else {}


def _latent(spec: ModelSpec) -> dict[str, Any]:
    if not spec.latent_attention:
        return {}
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(spec, name) for name in names} | {"q_lora_rank": spec.q_lora_rank or None}


def _experts(spec: ModelSpec) -> dict[str, Any]:
    if not spec.experts:
        return {}
    if spec.family == "ernie4_5_moe":
        return {
            "moe_num_experts": spec.experts,
            "moe_k": spec.experts_per_token,
            "moe_num_shared_experts": spec.shared_ffn // spec.ffn,
            "moe_intermediate_size": spec.ffn,
            "moe_layer_start_index": spec.dense_layers,
            "moe_layer_end_index": spec.layers - 1,
            "intermediate_size": spec.dense_ffn,
        }
    config: dict[str, Any] = {"num_experts_per_tok": spec.experts_per_token}
    if spec.family in LIKE_DEEPSEEK:
        return config | {
            "n_routed_experts": spec.experts,
            "n_shared_experts": spec.shared_ffn // spec.ffn,
            "moe_intermediate_size": spec.ffn,
            "first_k_dense_replace": spec.dense_layers,
            "intermediate_size": spec.dense_ffn or spec.ffn,
            "n_group": 1,
            "topk_group": 1,
        }
    if spec.family == "llama4_text":
        step = spec.layers // (spec.layers - spec.dense_layers)
        width = {"intermediate_size_mlp": spec.dense_ffn, "interleave_moe_layer_step": step}
        return config | {"num_local_experts": spec.experts} | width
    if spec.family == "nemotron_h":
        return config | {
            "n_routed_experts": spec.experts,
            "moe_intermediate_size": spec.ffn,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": spec.shared_ffn,
        }
    if spec.family in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        shared: dict[str, Any] = (
            {"shared_expert_intermediate_size": spec.shared_ffn} if spec.shared_ffn else {}
        )
        if spec.dense_layers:
            shared |= {"mlp_only_layers": list(range(spec.dense_layers)), "intermediate_size": spec.dense_ffn}
        return config | {"num_experts": spec.experts, "moe_intermediate_size": spec.ffn} | shared
    return config | {"num_local_experts": spec.experts}
