"""Parameter counts and config.json's fields against transformers' own models, on the meta device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from estimator import models
from estimator.models import ModelSpec, find, hf_config
from estimator.models.architectures import FAMILIES
from tests.estimator.models.hf_configs import config_of, with_layers

# Not read from config.json as config_of writes it, or not there at all.
NOT_COMPARED = {"name", "hf_id", "gated", "source", "published_parameters", "published_active_parameters"}
# what the language part alone does not say
NOT_COMPARED |= {"sees_images", "quantized_weights"}
NOT_COMPARED |= {"license", "license_source"}
NOT_COMPARED |= {field.name for field in fields(ModelSpec) if field.name.startswith("rope_")} | {"norm_eps"}

# Qwen 1 has no class in transformers; MPT with learned positions has one in llm-foundry only.
NOT_THERE = [n for n in models.names() if find(n).family == "qwen" or n.startswith("mpt-pretrain")]

WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
# What config.json can change of a family, and what no model of the table has.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "ministral": {"model_type": "ministral", "num_key_value_heads": 2, "head_dim": 32},
    "qwen2 with a window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3_moe, every second block": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "decoder_sparse_step": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "llama4, every second block": {
        "model_type": "llama4_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 160,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "deepseek_v2 with compressed queries": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_neox without biases, one part after the other": {
        "model_type": "gpt_neox",
        "attention_bias": False,
        "use_parallel_residual": False,
    },
    "falcon with grouped queries": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon, one part after the other, with biases": {
        "model_type": "falcon",
        "parallel_attn": False,
        "bias": True,
        "multi_query": False,
    },
    "stablelm with biases and both parts at once": {
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "num_key_value_heads": 2,
    },
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 32},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "tie_word_embeddings": False},
    "lfm2": {
        "model_type": "lfm2",
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "granitemoehybrid without experts": {
        "model_type": "granitemoehybrid",
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "nemotron_h by its pattern": {
        "model_type": "nemotron_h",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
    },
    "gemma4 with its own embeddings for each block, shared keys, wide MLPs": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 200,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma4 with experts, one projection of keys and values": {
        "model_type": "gemma4_text",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "mistral4": {
        "model_type": "mistral4",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "lfm3 without sandwich norms": {
        "model_type": "lfm3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
    },
    "olmo3": {"model_type": "olmo3", "num_key_value_heads": 2, "sliding_window": 32},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "num_key_value_heads": 2, "head_dim": 32},
    "seed_oss with biases everywhere": {
        "model_type": "seed_oss",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
}


def built(config: dict[str, Any]) -> Any:
    """transformers' model of that config.json, without memory."""
    pytest.importorskip("transformers")
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    special = {"bert": AutoModel, "mistral4": AutoModelForImageTextToText}
    factory = special.get(config["model_type"], AutoModelForCausalLM)
    with torch.device("meta"):
        return factory.from_config(AutoConfig.for_model(**config))


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [n for n in models.names() if n not in NOT_THERE])
def test_every_model_of_the_table_has_the_parameter_count_of_the_real_code(name: str) -> None:
    assert count(built(config_of(find(name)))) == find(name).parameters


@pytest.mark.parametrize("name", [n for n in models.names() if not n.startswith("mpt-pretrain")])
def test_every_model_of_the_table_is_read_from_its_config_json(name: str) -> None:
    table, read = find(name), hf_config.to_spec(config_of(find(name)), name)
    wrong = {
        field.name: (getattr(read, field.name), getattr(table, field.name))
        for field in fields(ModelSpec)
        if field.name not in NOT_COMPARED and getattr(read, field.name) != getattr(table, field.name)
    }
    assert not wrong


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_overrides_of_family_traits_are_counted(variant: str) -> None:
    config = WIDTHS | VARIANTS[variant]
    model = built(config)
    assert hf_config.to_spec(config, variant).parameters == count(model)
    sliding = [kind for kind in getattr(model.config, "layer_types", None) or () if kind != "full_attention"]
    if config["model_type"] in ("qwen2", "gemma2", "gpt_oss", "llama4_text", "olmo3"):
        window = {"sliding_window": 32, "attention_chunk_size": 32}
        assert hf_config.to_spec(config | window, variant).sliding_layers == len(sliding)


def test_every_family_is_compared_with_the_real_code() -> None:
    seen = {find(name).family for name in models.names() if name not in NOT_THERE}
    seen |= {variant["model_type"] for variant in VARIANTS.values()}
    assert seen >= FAMILIES.keys() - {"qwen"}


@pytest.mark.parametrize("name", ["bert-base-cased", "bert-large-uncased"])
def test_the_bert_checkpoint_has_the_model_and_pre_training_heads(name: str) -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import BertConfig, BertForPreTraining

    index = {"bert-base-cased": 108_932_934, "bert-large-uncased": 336_226_108}[name]
    with torch.device("meta"):
        whole = BertForPreTraining(BertConfig(**config_of(find(name))))
    assert count(whole) == index
    assert find(name).parameters == count(whole.bert)


def test_gemma_3_counts_the_model_without_vision_tower_and_projector() -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    vision |= {"num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}
    config = {"model_type": "gemma3", "text_config": config_of(find("gemma-3-4b")), "vision_config": vision}
    with torch.device("meta"):
        whole = Gemma3ForConditionalGeneration(Gemma3Config(**{**config, "mm_tokens_per_image": 256}))
    assert count(whole) == 4_300_079_472
    assert hf_config.to_spec(config, "gemma-3-4b").parameters == find("gemma-3-4b").parameters


@pytest.mark.parametrize(
    ("name", "index"), [("llama-4-scout", 108_641_793_536), ("llama-4-maverick", 401_583_781_376)]
)
def test_llama_4_counts_the_model_without_vision_model_and_projector(name: str, index: int) -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    vision = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}
    config = {"text_config": config_of(find(name)), "vision_config": vision}
    with torch.device("meta"):
        whole = Llama4ForConditionalGeneration(Llama4Config(**config))
    assert count(whole) == index
    assert hf_config.to_spec(config, name).parameters == find(name).parameters


# Real names of the linear layers that PEFT finds; experts are not linear layers in transformers 5.
TARGETS = [
    ("llama-3.2-1b", ["q_proj", "v_proj", "down_proj"]),
    ("phi-3-mini", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    ("phi-2", ["q_proj", "dense", "fc1", "fc2"]),
    ("bert-base-cased", ["query", "value"]),
    ("bert-base-cased", ["dense"]),
    ("pythia-70m", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
    ("falcon-7b", ["query_key_value", "dense_4h_to_h"]),
    ("mpt-7b", ["Wqkv", "out_proj", "up_proj"]),
    ("gpt-j-6b", ["k_proj", "out_proj", "fc_in", "fc_out"]),
    ("gemma-2-2b", ["q_proj", "k_proj", "o_proj", "gate_proj"]),
    ("deepseek-v2-lite", ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    ("deepseek-v3", ["q_a_proj", "q_b_proj", "kv_b_proj"]),
    ("gpt-oss-20b", ["q_proj", "o_proj"]),
]


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_adapters_have_the_parameter_count_of_peft(name: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    spec = with_layers(find(name), 2)
    model = built(config_of(spec))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets), low_cpu_mem_usage=True)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == spec.lora_parameters(4, targets)
