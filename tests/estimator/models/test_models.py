"""The model table, and shapes read from config.json."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator import models
from estimator.errors import UserError
from estimator.models import find, hf_config
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


# Their publishers give rounded counts only; test_models_against_transformers.py counts them in real code.
ROUNDED = {"gpt-j-6b": "6 B", "moonlight-16b-a3b": "16 B", "kimi-k2": "1 T"}


@pytest.mark.parametrize("name", [n for n in models.names() if n != "tiny-llama" and n not in ROUNDED])
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


@pytest.mark.parametrize("name", [n for n in models.names() if find(n).published_active_parameters])
def test_active_parameters_are_what_the_card_says(name: str) -> None:
    """Cards round or cut to the digits that they show, with or without the input embedding."""
    model = find(name)
    published = model.published_active_parameters or 0
    digits = 10 ** min(k for k in range(7, 10) if published % 10 ** (k + 1))
    counts = (model.active_parameters, model.active_parameters - model.vocab * model.hidden)
    assert published in {f(count / digits) * digits for count in counts for f in (math.floor, round)}


def test_every_model_with_experts_has_published_active_parameters() -> None:
    with_experts = [name for name in models.names() if find(name).experts]
    assert len(with_experts) > 10
    assert all(find(name).published_active_parameters for name in with_experts)


def test_moonlight_without_embeddings_is_what_its_paper_says() -> None:
    """15.29 B and 2.24 B active, both without embeddings: Liu et al. 2025 (arXiv:2502.16982), section 3."""
    model = find("moonlight-16b-a3b")
    assert round((model.parameters - model.embedding_parameters) / 1e9, 2) == 15.29
    assert round((model.active_parameters - model.embedding_parameters) / 1e9, 2) == 2.24


def test_config_json_gives_the_same_shape_as_the_table() -> None:
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
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA_CONFIG.items() if key != field}
    with pytest.raises(UserError, match=f"no {field}"):
        hf_config.to_spec(config, "mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5"}, "model_type 't5', which is not supported"),
        ({"hidden_size": 4095}, "hidden_size 4095, which 32 attention heads don't divide"),
        ({"hidden_size": "big"}, "hidden_size = 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 5}, "32 attention heads can't be shared by 5"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"text_config": "llama"}, "text_config = 'llama'"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({"rope_scaling": {"factor": "8"}}, "factor = '8'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"model_type": "gemma2", "sliding_window": 16, "layer_types": 4}, "layer_types = 4"),
        ({"model_type": "qwen3_moe"}, "no moe_intermediate_size"),
        (MOE | {"num_experts_per_tok": 9}, "experts_per_token = 9 does not go with experts = 8"),
        (MOE | {"num_local_experts": None}, "num_local_experts = None"),
        (MLA | {"qk_rope_head_dim": None}, "qk_rope_head_dim = None"),
        (MLA | {"first_k_dense_replace": 33}, "dense_layers = 33 are more than its 32 layers"),
        (MLA | {"attention_bias": True}, "attention_bias = true with latent attention"),
        ({"model_type": "phi", "head_dim": 64}, "32 heads * 64 = 2048, but its hidden size is 4096"),
        ({"quantization_config": {"bits": 4}}, "already quantised"),
    ],
)
def test_a_field_that_contradicts_or_is_not_supported_is_named_with_its_value(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        hf_config.to_spec(LLAMA_CONFIG | change, "mine")
    assert words in caught.value.problem
    assert "\n" not in caught.value.problem


def test_lora_counts_both_matrices_of_each_target() -> None:
    tiny = find("tiny-llama")
    assert tiny.lora_parameters(8, ["q_proj"]) == 4 * 8 * (256 + 256)
    assert tiny.lora_parameters(8, ["k_proj"]) == 4 * 8 * (256 + 128)
    with pytest.raises(UserError, match="'wq'"):
        tiny.lora_parameters(8, ["wq"])


def test_lora_on_experts_has_adapters_for_each_and_for_those_that_are_shared() -> None:
    lite = find("deepseek-v2-lite")  # 1 dense block; 26 with 64 experts and a shared MLP of two widths
    widths = [10944] + 26 * (64 * [1408] + [2816])
    assert lite.lora_parameters(4, ["up_proj"]) == 4 * sum(2048 + width for width in widths)


def test_a_fused_matrix_has_one_adapter_where_the_generic_names_have_three() -> None:
    phi = find("phi-3-mini")
    assert phi.lora_parameters(8, ["qkv_proj"]) == 32 * 8 * (3072 + 3 * 3072)
    assert phi.lora_parameters(8, ["q_proj", "k_proj", "v_proj"]) == 32 * 8 * 3 * (3072 + 3072)


def test_a_layer_that_is_named_twice_is_adapted_once() -> None:
    phi = find("phi-2")
    assert phi.lora_parameters(8, ["fc1", "up_proj"]) == phi.lora_parameters(8, ["fc1"])


@pytest.mark.parametrize("name", models.names())
def test_lora_on_all_projections_of_a_model_is_accepted(name: str) -> None:
    model = find(name)
    assert model.lora_parameters(2, model.projections) == 2 * model.lora_parameters(1, model.projections) > 0


def test_a_target_that_the_family_lacks_is_answered_with_the_names_that_it_has() -> None:
    with pytest.raises(UserError) as caught:
        find("bert-base-cased").lora_parameters(8, ["gate_proj"])
    assert "q_proj" in caught.value.advice
    assert "query" in caught.value.advice
    assert "gate_proj" not in caught.value.advice


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_model_with_fewer_layers_has_as_many_parameters_as_those_layers(name: str, layers: int) -> None:
    model = find(name)
    less = model.with_layers(layers)
    blocks = (layers - less.dense_layers) * model.layer_parameters
    blocks += less.dense_layers * model.dense_layer_parameters
    outside = model.parameters - (model.layers - model.dense_layers) * model.layer_parameters
    outside -= model.dense_layers * model.dense_layer_parameters
    assert less.parameters == blocks + outside


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
def test_a_config_json_of_any_content_gives_a_shape_or_one_clear_line(name: str, data: st.DataObject) -> None:
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


def test_gemma_3_s_config_json_leaves_out_what_its_class_says() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    read = hf_config.to_spec({"model_type": "gemma3", "text_config": text | rope}, "mine")
    table = find("gemma-3-4b")
    for field in ("parameters", "heads", "kv_heads", "max_seq_len", "rope_theta", "sliding_layers"):
        assert getattr(read, field) == getattr(table, field)


def test_kimi_k2_is_read_as_the_architecture_that_it_has() -> None:
    kimi = find("kimi-k2")
    read = hf_config.to_spec(config_of(kimi) | {"model_type": "kimi_k2"}, "mine")
    assert (read.family, read.parameters) == ("deepseek_v3", kimi.parameters)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3"])
def test_weights_that_are_published_quantised_have_a_shape_all_the_same(name: str) -> None:
    config = config_of(find(name)) | {"quantization_config": {"quant_method": "mxfp4"}}
    assert hf_config.to_spec(config, "mine").parameters == find(name).parameters
