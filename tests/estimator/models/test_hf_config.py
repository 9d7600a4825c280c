"""Shapes from config.json: what is read, and what is refused with its field and value."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator import models
from estimator.errors import UserError
from estimator.models import FAMILIES, find, hf_config
from tests.estimator.models.hf_configs import config_of

LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
}


MOE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


MLA = {
    "model_type": "deepseek_v2",
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def test_config_json_and_table_give_the_same_shape() -> None:
    read = hf_config.to_spec(LLAMA_CONFIG, "llama-8b")
    table = find("llama-8b")
    for field in ("parameters", "layers", "rope_theta", "rope_scaling_factor", "norm_eps", "max_seq_len"):
        assert getattr(read, field) == getattr(table, field)


def test_transformers_5_rope_parameters_are_read() -> None:
    config = {k: v for k, v in LLAMA_CONFIG.items() if not k.startswith("rope")}
    config["rope_parameters"] = {**LLAMA_CONFIG["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]
    read = hf_config.to_spec(config, "m")
    assert (read.rope_theta, read.rope_scaling_type, read.rope_scaling_factor) == (500000.0, "llama3", 8.0)


@pytest.mark.parametrize("field", ["model_type", "hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named_in_the_error(field: str) -> None:
    config = {key: value for key, value in LLAMA_CONFIG.items() if key != field}
    with pytest.raises(UserError, match=f"no {field}"):
        hf_config.to_spec(config, "mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5"}, "model_type 't5', which is not supported"),
        ({"hidden_size": 4095}, "hidden_size 4095, which 32 attention heads don't divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 5}, "32 attention heads are not divisible by 5"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"text_config": "llama"}, "text_config = 'llama'"),
        ({"model_type": "qwen3_moe"}, "no moe_intermediate_size"),
        (MOE | {"num_experts_per_tok": 9}, "experts_per_token = 9 does not go with experts = 8"),
        (MLA | {"first_k_dense_replace": 33}, "dense_layers = 33 are more than its 32 layers"),
        (MLA | {"attention_bias": True}, "attention_bias = true with latent attention"),
        ({"model_type": "phi", "head_dim": 64}, "32 heads * 64 = 2048, but its hidden size is 4096"),
        ({"quantization_config": {"bits": 4}}, "already quantized"),
    ],
)
def test_contradictory_and_unsupported_fields_are_named_with_their_value(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        hf_config.to_spec(LLAMA_CONFIG | change, "mine")
    assert words in caught.value.problem
    assert "\n" not in caught.value.problem


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10_000),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(name=st.sampled_from(models.names()), data=st.data())
def test_any_config_json_gives_a_shape_or_a_one_line_error(name: str, data: st.DataObject) -> None:
    config = config_of(find(name)) | {"rope_scaling": {"factor": 2.0}, "layer_types": None, "attn_config": {}}
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[field] = data.draw(JUNK)
    problem = "mine"
    try:
        assert hf_config.to_spec(config, "mine").parameters > 0
    except UserError as error:
        problem = error.problem
    assert "mine" in problem
    assert "\n" not in problem


def test_missing_fields_of_a_gemma_3_config_have_the_defaults_of_its_class() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    read = hf_config.to_spec({"model_type": "gemma3", "text_config": text | rope}, "mine")
    table = find("gemma-3-4b")
    for field in ("parameters", "heads", "kv_heads", "max_seq_len", "rope_theta", "sliding_layers"):
        assert getattr(read, field) == getattr(table, field)


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    kimi = find("kimi-k2")
    read = hf_config.to_spec(config_of(kimi) | {"model_type": "kimi_k2"}, "mine")
    assert (read.family, read.parameters) == ("deepseek_v3", kimi.parameters)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3"])
def test_quantized_published_weights_have_a_shape(name: str) -> None:
    config = config_of(find(name)) | {"quantization_config": {"quant_method": "mxfp4"}}
    assert hf_config.to_spec(config, "mine").parameters == find(name).parameters


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen", "olmo2", "mpt", "lfm2", "lfm3"}))
def test_each_family_has_the_activation_of_its_code(family: str) -> None:
    """Without Qwen 1 (not in transformers), OLMo 2 (no defaults), MPT, LFM2, LFM3 (fixed in their code)."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    fields = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")
    names = [getattr(config, field) for field in fields if getattr(config, field, None)]
    assert names == [FAMILIES[family].hidden_act]


BARE = {field: value for field, value in LLAMA_CONFIG.items() if field != "rope_scaling"}


@pytest.mark.parametrize(
    ("fields", "activation", "dropout", "rotated"),
    [
        ({}, "silu", 0.0, 1.0),
        ({"hidden_act": "swish", "attention_dropout": 0, "partial_rotary_factor": 1.0}, "silu", 0.0, 1.0),
        ({"hidden_act": "gelu", "attention_dropout": 0.1}, "gelu", 0.1, 1.0),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "silu", 0.0, 0.5),
    ],
)
def test_fields_that_only_some_engines_use_are_read(
    fields: dict[str, Any], activation: str, dropout: float, rotated: float
) -> None:
    spec = hf_config.to_spec({**BARE, **fields}, "mine")
    assert (spec.hidden_act, spec.attention_dropout) == (activation, dropout)
    assert spec.partial_rotary_factor == rotated


def test_a_missing_dropout_is_the_default_of_the_family() -> None:
    fields = {**BARE, "model_type": "seed_oss"}
    assert hf_config.to_spec(fields, "mine").attention_dropout == 0.1
    assert hf_config.to_spec(fields | {"attention_dropout": 0.0}, "mine").attention_dropout == 0.0


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_act", 1), ("attention_dropout", "no"), ("attention_dropout", -0.1)]
)
def test_an_activation_or_dropout_of_a_wrong_type_is_named_in_the_error(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{field} = {value!r}; it must be"):
        hf_config.to_spec({**BARE, field: value}, "mine")
