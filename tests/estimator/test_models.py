"""The model table, and shapes read from config.json."""

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models import ModelSpec, find

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


@pytest.mark.parametrize("name", [name for name in models.names() if name != "tiny-llama"])
def test_computed_parameters_equal_the_published_count(name: str) -> None:
    model = find(name)
    assert model.parameters == model.published_parameters


@pytest.mark.parametrize("name", models.names())
def test_every_row_names_its_source(name: str) -> None:
    assert find(name).source


@pytest.mark.parametrize(
    ("alias", "hf_id"),
    [
        ("llama-8b", "meta-llama/Llama-3.1-8B"),
        ("LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("ministral-8b", "mistralai/Ministral-8B-Instruct-2410"),
        ("mistral-8b", "mistralai/Ministral-8B-Instruct-2410"),
        ("codestral", "mistralai/Codestral-22B-v0.1"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("llama-405b", "meta-llama/Llama-3.1-405B"),
    ],
)
def test_names_aliases_and_hugging_face_ids_find_the_model(alias: str, hf_id: str) -> None:
    assert find(alias).hf_id == hf_id


def test_tiny_llama_is_a_few_million_parameters_in_llama_3_shape() -> None:
    tiny = find("tiny-llama")
    assert tiny.parameters == 5_245_184
    assert (tiny.family, tiny.head_dim, tiny.max_seq_len, tiny.hf_id) == ("llama", 32, 2048, None)


def test_an_unknown_model_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UserError) as caught:
        find("lama-8b")
    assert "'lama-8b'" in caught.value.problem
    assert "llama-8b" in caught.value.advice


def test_a_mixture_of_experts_counts_all_weights_and_the_active_ones() -> None:
    mixtral = find("mixtral-8x7b")
    assert mixtral.parameters == 46_702_792_704
    assert round(mixtral.active_parameters / 1e9, 1) == 12.9


def test_config_json_gives_the_same_shape_as_the_table() -> None:
    read = ModelSpec.from_hf_config(LLAMA_CONFIG, "llama-8b")
    table = find("llama-8b")
    for field in ("parameters", "layers", "rope_theta", "rope_scaling_factor", "norm_eps", "max_seq_len"):
        assert getattr(read, field) == getattr(table, field)


def test_transformers_5_rope_parameters_are_read() -> None:
    config = {k: v for k, v in LLAMA_CONFIG.items() if not k.startswith("rope")}
    config["rope_parameters"] = {**LLAMA_CONFIG["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]
    read = ModelSpec.from_hf_config(config, "m")
    assert (read.rope_theta, read.rope_scaling_type, read.rope_scaling_factor) == (500000.0, "llama3", 8.0)


@pytest.mark.parametrize("field", ["model_type", "hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA_CONFIG.items() if key != field}
    with pytest.raises(UserError, match=f"no {field}"):
        ModelSpec.from_hf_config(config, "mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bert"}, "model_type 'bert', which is not supported"),
        ({"hidden_size": 4095}, "hidden_size 4095, which 32 attention heads don't divide"),
        ({"hidden_size": "big"}, "hidden_size = 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 5}, "32 attention heads can't be shared by 5"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "already quantised"),
    ],
)
def test_a_field_that_contradicts_or_is_not_supported_is_named_with_its_value(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        ModelSpec.from_hf_config(LLAMA_CONFIG | change, "mine")
    assert words in caught.value.problem
    assert "\n" not in caught.value.problem


def test_lora_counts_both_matrices_of_each_target() -> None:
    tiny = find("tiny-llama")
    assert tiny.lora_parameters(8, ["q_proj"]) == 4 * 8 * (256 + 256)
    assert tiny.lora_parameters(8, ["k_proj"]) == 4 * 8 * (256 + 128)
    with pytest.raises(UserError, match="'wq'"):
        tiny.lora_parameters(8, ["wq"])
