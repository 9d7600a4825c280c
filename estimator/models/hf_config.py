"""Shapes from the contents of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.errors import UserError
from estimator.models import compressed, recurrent, two_kinds, untried, vision
from estimator.models.architectures import FAMILIES, family_of
from estimator.models.config_reader import ConfigReader
from estimator.models.spec import ModelSpec
from estimator.models.weight_formats import FORMATS

# Name here -> field of config.json; the first existing one counts.
_FIELDS = {
    "layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "vocab": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "max_seq_len", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "top_k_experts"),
    "shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
}
# What config.json leaves out because it is the default of the family's configuration class
# (transformers 5.23.0, models/*/configuration_*.py).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
    },
    "gemma4_text": {"sliding_window": 512},
    "lfm3": {"head_dim": 128, "conv_L_cache": 7, "sliding_window": 256, "rope_theta": 1_000_000.0},
    "gpt_oss": {"attention_bias": True, "max_position_embeddings": 131_072},
    "falcon": {"max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True},
    "mpt": {"expansion_ratio": 4, "no_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "glm4": {"attention_bias": True},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"first_k_dense_replace": 3},
    "deepseek_v32": {"first_k_dense_replace": 3},
    "seed_oss": {"attention_bias": True},
    "exaone4": {"sliding_window_pattern": 4},
    "lfm2": {"conv_L_cache": 3},
    "qwen3_next": {"linear_conv_kernel_dim": 4},
    "qwen3_5_text": {"linear_conv_kernel_dim": 4},
    "qwen3_5_moe_text": {"linear_conv_kernel_dim": 4},
    "nemotron_h": {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
    "granitemoehybrid": {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 256},
    "gpt_neox": {"attention_bias": True, "use_parallel_residual": True},
}
_SAME_CODE = {
    "kimi_k2": "deepseek_v3",  # its model_type in transformers
    "qwen3_vl_text": "qwen3",  # positions of images and of video apart
    "gemma4_unified_text": "gemma4_text",  # without its own embeddings for each block
}
_TIED = (  # unless config.json says otherwise
    "gemma",
    "gemma2",
    "gemma3_text",
    "falcon",
    "mpt",
    "bert",
    "smollm3",
    "ernie4_5",
    "ernie4_5_moe",
    "lfm2",
    "gemma4_text",
    "lfm3",
)
_FFN = {
    "falcon": "ffn_hidden_size",
    "gptj": "n_inner",
    "gpt2": "n_inner",
}  # 4 * hidden where config.json gives none
# The field may be missing in these, and means as many key/value heads as heads.
_KV_HEADS_OPTIONAL = (
    "llama",
    "qwen",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "gpt_neox",
    "gptj",
    "mpt",
    "bert",
    "granite",
    "hunyuan_v1_dense",
)
# Have moe_intermediate_size
_EXPERT_WIDTH = (
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "mistral4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "ernie4_5_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
)
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "mistral4", "glm4_moe_lite", "glm_moe_dsa")
_SHARED_EXPERT_WIDTH = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")  # shared_expert_intermediate_size
_MAYBE_EXPERTS = ("granitemoehybrid", "nemotron_h", "gemma4_text")
_EXPERTS = (*_EXPERT_WIDTH, *_MAYBE_EXPERTS, "mixtral", "llama4_text", "gpt_oss", "minimax_m2")
_NO_O_BIAS = ("glm4", "glm4_moe", "seed_oss")  # attention_bias is that of queries, keys and values
_ACTIVATION = {  # what others call hidden_act
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
    "gemma4_text": "hidden_activation",
    "nemotron_h": "mlp_hidden_act",
    "gptj": "activation_function",
    "falcon": "activation",
}
_REFUSED = (
    "qk_layernorm",
    "qk_ln",
    "add_cross_attention",
    "moe_latent_size",
    "mamba_proj_bias",
    "conv_bias",
)  # they add parameters that aren't counted


def to_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Return the shape in a ``config.json``; for a multimodal model, that of its language model.

    Raises :class:`UserError`, naming field and value, for an architecture that is not supported, a missing
    field, or values that contradict each other.
    """
    reader = ConfigReader(language_part(config, name), name)
    family = shared_code(reader.text("model_type"))
    own_code = not is_known(family) and "AutoModelForCausalLM" in reader.mapping("auto_map")
    if not (own_code or is_known(family)):
        raise UserError(
            f"Model {name}: config.json has model_type {family!r}, which is not supported.",
            f"Supported are {', '.join(FAMILIES)}, and the causal models of transformers 5.23.",
        )
    reader.defaults = _DEFAULTS.get(family, {})
    _refuse(reader)
    shape = _widths(reader, family)
    shape |= _experts(reader, family) | _latent(reader, shape) | _window(reader, family, shape["layers"])
    shape |= recurrent.fields(reader, family, shape["layers"])
    shape |= compressed.fields(reader, family, shape["layers"])
    shape |= two_kinds.fields(reader, family, shape["layers"], reader.integer("intermediate_size", default=1))
    return ModelSpec(
        name=name,
        family=family,
        **shape,
        **(
            family_of(family).traits()
            | _traits(reader, family)
            | _activation(reader, family)
            | _dropout(reader)
        ),
        **_rope(reader),
        **_positions(reader, family, shape["max_seq_len"]),
        tied_embeddings=bool(reader.get("tie_word_embeddings", family in _TIED)),
        norm_eps=_epsilon(reader),
        sees_images="text_config" in config,
        vision=vision.from_config(config, shape["hidden"]),
        quantized_weights=quantization_of(reader) or "",
        own_code=own_code,
        source=f"config.json of {name}",
    )


def is_known(family: str) -> bool:
    """Whether transformers 5.23 has a causal model of this family."""
    return family in FAMILIES or untried.is_untried(family)


def shared_code(model_type: str) -> str:
    """Return the family whose code a ``model_type`` uses, in most cases the same name."""
    return _SAME_CODE.get(model_type, model_type)


def language_part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the language model's configuration, which multimodal models keep under ``text_config``."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise UserError(f"Model {name}: config.json has text_config = {text!r}; it must be an object.")
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**text, **outer}  # transformers ties by the outer one


def quantization_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``quantization_config``, which multimodal models may keep under ``text_config``."""
    part = language_part(config, "the checkpoint")
    options = dict(part.get("quantization_config") or {})
    return {"expert_dtype": part.get("expert_dtype")} | options if options else {}


def needs_conversion(config: Mapping[str, Any]) -> bool:
    """Whether training needs a conversion: quantized weights, or parts besides a language model."""
    return bool(quantization_options(config)) or "text_config" in config


def _refuse(reader: ConfigReader) -> None:
    attention = reader.mapping("attn_config")
    for flag in _REFUSED:
        if reader.get(flag) or attention.get(flag):
            raise UserError(f"Model {reader.name}: config.json has {flag} = true, which is not supported.")
    method = quantization_of(reader)
    if method is not None and method not in FORMATS:
        raise UserError(
            f"Model {reader.name}: its weights are already quantized (quantization_config in config.json, "
            f"quant_method {method or 'not given'}). Supported formats: {', '.join(FORMATS)}.",
            "Start from the unquantized model; --method qlora quantizes it on loading.",
        )


def quantization_of(reader: ConfigReader) -> str | None:
    """Return the format of published weights; None if they are in 16 or 32 bits."""
    options = reader.mapping("quantization_config")
    return weight_format({"expert_dtype": reader.get("expert_dtype"), **options}) if options else None


def weight_format(options: Mapping[str, Any]) -> str:
    """Return the format that a ``quantization_config`` describes, mostly its ``quant_method``."""
    method = str(options.get("quant_method") or "")
    if method == "fp8" and options.get("expert_dtype") == "fp4":  # DeepSeek V4
        return "fp4"
    return "bitsandbytes" if method.startswith("bitsandbytes") else method


# ---------------------------------------------------------------------------------------------------------
# Parts of the shape, as keyword arguments of ModelSpec


def _widths(reader: ConfigReader, family: str) -> dict[str, Any]:
    hidden, heads = reader.integer(*_FIELDS["hidden"]), reader.integer(*_FIELDS["heads"])
    latent = reader.get("kv_lora_rank") is not None
    if reader.get("head_dim") is None and hidden % heads and not latent:
        raise UserError(
            f"Model {reader.name}: config.json has hidden_size {hidden}, "
            f"which {heads} attention heads don't divide, and no head_dim."
        )
    head_dim = reader.integer("kv_channels", default=reader.integer("head_dim", default=hidden // heads))
    return {
        "layers": _layers(reader, family),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _kv_heads(reader, family, heads),
        "head_dim": head_dim,
        "ffn": _ffn(reader, family, hidden),
        "vocab": reader.integer(*_FIELDS["vocab"]),
        "max_seq_len": reader.integer(*_FIELDS["max_seq_len"]),
    }


def _layers(reader: ConfigReader, family: str) -> int:
    return len(recurrent.kinds(reader)) if family == "nemotron_h" else reader.integer(*_FIELDS["layers"])


def _kv_heads(reader: ConfigReader, family: str, heads: int) -> int:
    if family == "falcon":  # modeling_falcon.py, FalconAttention
        if reader.get("new_decoder_architecture"):
            return reader.integer("num_kv_heads", default=heads)
        return 1 if reader.get("multi_query") else heads
    if family in _LATENT:  # the latent is expanded to keys for every head
        return heads
    optional = family in _KV_HEADS_OPTIONAL
    return reader.integer("num_key_value_heads", default=heads if optional else None)


def _ffn(reader: ConfigReader, family: str, hidden: int) -> int:
    """Return the width of the MLP, or of one expert."""
    if family in _EXPERT_WIDTH or (family not in FAMILIES and reader.get("moe_intermediate_size")):
        return reader.integer("moe_intermediate_size")
    if family == "gemma4_text" and reader.get("enable_moe_block"):
        return reader.integer("moe_intermediate_size")
    if family == "mpt":
        return reader.integer("expansion_ratio") * hidden
    if family in _FFN:
        return reader.integer(_FFN[family], default=4 * hidden)
    if family == "lfm2":
        return recurrent.lfm2_width(reader)
    if family == "granitemoehybrid" and not reader.get("num_local_experts"):
        return reader.integer("shared_intermediate_size")
    if family == "nemotron_h" and "moe" in recurrent.kinds(reader):
        return reader.integer("moe_intermediate_size")
    width = reader.integer("intermediate_size")
    return width // 2 if family == "qwen" else width  # Qwen 1 counts gate and up as one


def _experts(reader: ConfigReader, family: str) -> dict[str, int]:
    """Return the fields of experts, shared experts and dense blocks; empty for dense models."""
    new = family not in FAMILIES and any(reader.get(field) for field in _FIELDS["experts"])
    if not new and family not in _EXPERTS:
        return {}
    if family in _MAYBE_EXPERTS and not recurrent.has_experts(reader, family):
        return {}
    counts = {
        "experts": reader.integer(*_FIELDS["experts"]),
        "experts_per_token": reader.integer(*_FIELDS["experts_per_token"]),
        "shared_ffn": _shared_width(reader, family),
        "dense_layers": _dense_layers(reader, family),
    }
    if counts.get("dense_layers"):
        field = "intermediate_size_mlp" if family == "llama4_text" else "intermediate_size"
        counts["dense_ffn"] = reader.integer(field)
    return counts


def _shared_width(reader: ConfigReader, family: str) -> int:
    """Return the total width of a block's shared experts."""
    if family == "llama4_text":
        return reader.integer("intermediate_size")
    if family == "granitemoehybrid":
        return reader.integer("shared_intermediate_size")
    if family == "gemma4_text":  # a dense MLP in addition to experts
        return reader.integer("intermediate_size")
    if family == "nemotron_h":
        width = reader.integer("moe_shared_expert_intermediate_size", "moe_intermediate_size")
        return reader.integer("n_shared_experts", default=1, least=0) * width
    if family in _SHARED_EXPERT_WIDTH:
        return reader.integer("shared_expert_intermediate_size")
    if family in compressed.FAMILIES:  # one, whatever config.json says
        return reader.integer("moe_intermediate_size")
    shared = reader.integer(*_FIELDS["shared_experts"], default=0, least=0)
    return shared and shared * reader.integer("moe_intermediate_size")


def _dense_layers(reader: ConfigReader, family: str) -> int:
    """Return the number of blocks without experts, by the rules of transformers."""
    layers = _layers(reader, family)
    if family in compressed.FAMILIES:
        return 0
    if family == "nemotron_h":
        return recurrent.kinds(reader).count("mlp")
    if family == "llama4_text":
        step = reader.integer("interleave_moe_layer_step", default=1)
        listed = reader.items("moe_layers")
        return layers - (len(listed) if listed else layers // step)
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        dense_layers, step = reader.items("mlp_only_layers"), reader.integer("decoder_sparse_step", default=1)
        return sum(i in dense_layers or (i + 1) % step > 0 for i in range(layers))
    if family == "ernie4_5_moe":
        first = reader.integer("moe_layer_start_index", default=1, least=0)
        last = reader.integer("moe_layer_end_index", default=layers - 1, least=0)
        step = reader.integer("moe_layer_interval", default=1)
        return layers - sum((i + 1) % step == 0 and first <= i <= last for i in range(layers))
    listed = reader.items("mlp_layer_types")
    if family in _LATENT and listed:
        return listed.count("dense")
    return reader.integer("first_k_dense_replace", default=0, least=0)


def _latent(reader: ConfigReader, shape: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of multi-head latent attention; ``head_dim`` is the sum of its two parts."""
    if reader.get("kv_lora_rank") is None:
        return {}
    nope, rope = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    return {
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "q_lora_rank": reader.integer("q_lora_rank", default=0),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": reader.integer("v_head_dim", default=shape["hidden"] // shape["heads"]),
        "head_dim": nope + rope,
        **_indexer(reader, shape["layers"]),
    }


def _indexer(reader: ConfigReader, layers: int) -> dict[str, int]:
    """Return the shape of sparse attention's indexers, and the number of blocks that have one."""
    if reader.get("index_topk") is None:
        return {}
    kinds = reader.items("indexer_types")
    pattern = reader.get("index_topk_pattern")
    if isinstance(pattern, str):
        count = pattern.count("F")
    elif kinds:
        count = kinds.count("full")
    else:  # GlmMoeDsaConfig; DeepSeek V3.2 has neither field
        period = reader.integer("index_topk_freq", default=1)
        offset = reader.integer("index_skip_topk_offset", default=2, least=0)
        count = sum(max(i - offset + 1, 0) % period == 0 for i in range(layers))
    return {
        "index_layers": count,
        "index_heads": reader.integer("index_n_heads"),
        "index_head_dim": reader.integer("index_head_dim"),
    }


def _window(reader: ConfigReader, family: str, layers: int) -> dict[str, int | None]:
    """Return the window and the number of blocks with it, by the rules of transformers' configuration."""
    field = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    window = reader.integer(field, default=0, least=0)
    if not window or (reader.get("use_sliding_window") is False) or family in _NO_WINDOW:
        return {}
    kinds = reader.items("layer_types")
    if family in two_kinds.FAMILIES:
        count = two_kinds.kinds(reader, layers).count("sliding_attention")
    elif family == "lfm3" and not kinds:
        count = recurrent.lfm3_kinds(layers).count("sliding_attention")
    elif kinds:
        count = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    elif family in ("gemma2", "gpt_oss"):  # every second block, from the first
        count = (layers + 1) // 2
    elif family == "gemma3_text":
        count = layers - layers // reader.integer("sliding_window_pattern", default=6)
    elif family == "olmo3":
        count = layers - layers // 4
    elif family == "exaone4":
        count = _local_blocks(reader, layers)
    elif family == "llama4_text":  # blocks without rotary positions see everything
        rotary = reader.items("no_rope_layers")
        every = reader.integer("no_rope_layer_interval", default=4)
        count = sum(map(bool, rotary)) if rotary else layers - layers // every
    elif family in ("qwen2", "qwen3"):
        count = max(0, layers - reader.integer("max_window_layers", default=28, least=0))
    else:
        count = layers
    return {"sliding_window": window, "sliding_layers": count} if count else {}


_NO_WINDOW = (
    *_LATENT,
    *compressed.FAMILIES,
    "llama",
    "gemma",
    "granite",
    "smollm3",
    "minimax_m2",
)  # don't read it


def _local_blocks(reader: ConfigReader, layers: int) -> int:
    """Count EXAONE 4's blocks with a window, by a period or a pattern such as "LLLG"."""
    pattern = reader.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return sum(pattern[i % len(pattern)] == "L" for i in range(layers)) if pattern else 0
    return layers - layers // reader.integer("sliding_window_pattern")


def _traits(reader: ConfigReader, family: str) -> dict[str, Any]:
    """Return the family's traits that a config.json overrides."""
    changed: dict[str, Any] = {}
    if family == "mpt" and not reader.get("no_bias"):
        return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "norm_bias"), True)
    if family == "falcon":
        return _falcon_traits(reader)
    if reader.get("attention_bias") is not None:
        if reader.get("attention_bias") and reader.get("kv_lora_rank") is not None:
            raise UserError(
                f"Model {reader.name}: config.json has attention_bias = true with latent attention, "
                "which is not supported."
            )
        changed |= dict.fromkeys(("qkv_bias", "o_bias"), bool(reader.get("attention_bias")))
        if family in _NO_O_BIAS:
            changed["o_bias"] = bool(reader.get("attention_out_bias"))
    if family in ("ernie4_5", "ernie4_5_moe"):
        changed |= dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), bool(reader.get("use_bias")))
    if family == "gemma4_text":
        changed["norms_per_layer"] = 4 + (3 if reader.get("enable_moe_block") else 0)
        changed["norms_per_layer"] += bool(
            reader.integer("hidden_size_per_layer_input", default=256, least=0)
        )
    if family == "lfm3":
        changed["norms_per_layer"] = 2 if reader.get("use_sandwich_norm") is False else 4
        changed["head_gates"] = reader.get("use_attention_gate") is not False
    if family == "glm4_moe" and reader.get("use_qk_norm"):
        changed["qk_norm"] = "head"
    if family == "llama4_text" and reader.get("use_qk_norm") is not False:
        changed["qk_norm"] = "unweighted"
    for name, field in (
        ("qkv_bias", "qkv_bias"),
        ("qkv_bias", "use_qkv_bias"),
        ("mlp_bias", "mlp_bias"),
        ("parallel_residual", "use_parallel_residual"),
    ):
        if reader.get(field) is not None:
            changed[name] = bool(reader.get(field))
    if family == "stablelm" and changed.get("parallel_residual"):
        changed["norms_per_layer"] = 1
    if family == "qwen2":  # its code adds them whatever config.json says
        changed["qkv_bias"], changed["o_bias"] = True, False
    return changed


def _dropout(reader: ConfigReader) -> dict[str, float]:
    """Return the dropout of attention probabilities if config.json has one."""
    dropout = reader.number("attention_dropout", or_zero=True)
    return {} if dropout is None else {"attention_dropout": dropout}


def _activation(reader: ConfigReader, family: str) -> dict[str, str]:
    """Return the MLP's activation if config.json has one; MPT's is fixed in its code."""
    field = _ACTIVATION.get(family, "hidden_act")
    if family == "mpt" or reader.get(field) is None:
        return {}
    name = reader.text(field)
    return {"hidden_act": "silu" if name == "swish" else name}  # one function (transformers' ACT2FN)


def _falcon_traits(reader: ConfigReader) -> dict[str, Any]:
    """Return the traits of Falcon, whose number of norms depends on the layout of its blocks.

    modeling_falcon.py, FalconDecoderLayer.
    """
    parallel = bool(reader.get("parallel_attn"))
    default = 2 if reader.get("new_decoder_architecture") else 1
    return {
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), bool(reader.get("bias"))),
        "parallel_residual": parallel,
        "norms_per_layer": reader.integer("num_ln_in_parallel_attn", default=default) if parallel else 2,
    }


def _rope(reader: ConfigReader) -> dict[str, Any]:
    scaling = reader.mapping("rope_parameters") or reader.mapping("rope_scaling")
    # Gemma 3 has one for each kind of block
    rope = ConfigReader(scaling, reader.name)
    rope = ConfigReader(rope.mapping("full_attention") or rope.mapping("compress") or scaling, reader.name)
    kind = rope.get("rope_type", rope.get("type"))
    # DeepSeek V4's compressed tokens have another base
    main = ConfigReader(ConfigReader(scaling, reader.name).mapping("main"), reader.name)
    theta = main.number("rope_theta") or rope.number("rope_theta")
    theta = theta or reader.number("rope_theta") or reader.number("rotary_emb_base")
    return {
        "rope_theta": theta or 10_000.0,
        "rope_scaling_type": None if kind in (None, "default") else str(kind),
        "rope_scaling_factor": rope.number("factor"),
        "rope_low_freq_factor": rope.number("low_freq_factor"),
        "rope_high_freq_factor": rope.number("high_freq_factor"),
        "rope_original_max_seq_len": rope.integer("original_max_position_embeddings", default=0) or None,
        "partial_rotary_factor": (
            rope.number("partial_rotary_factor") or reader.number("partial_rotary_factor") or 1.0
        ),
    }


def _positions(reader: ConfigReader, family: str, max_seq_len: int) -> dict[str, Any]:
    """Return the fields of learned positions and token types, which only BERT has.

    transformers' MPT always has ALiBi; llm-foundry's may have learned positions.
    """
    if family == "bert":
        return {
            "position_embeddings": max_seq_len,
            "token_types": reader.integer("type_vocab_size", default=2),
        }
    return {}


def _epsilon(reader: ConfigReader) -> float:
    fields = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    return next((value for field in fields if (value := reader.number(field)) is not None), 1e-6)
