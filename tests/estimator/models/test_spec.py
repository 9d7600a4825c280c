"""A spec's adapters, and the same model with fewer layers."""

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models import find


def test_lora_counts_both_matrices_of_each_target() -> None:
    tiny = find("tiny-llama")
    assert tiny.lora_parameters(8, ["q_proj"]) == 4 * 8 * (256 + 256)
    assert tiny.lora_parameters(8, ["k_proj"]) == 4 * 8 * (256 + 128)
    with pytest.raises(UserError, match="'wq'"):
        tiny.lora_parameters(8, ["wq"])


def test_lora_on_experts_adapts_each_routed_and_shared_expert() -> None:
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


def test_an_unknown_lora_target_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UserError) as caught:
        find("bert-base-cased").lora_parameters(8, ["gate_proj"])
    assert "q_proj" in caught.value.advice
    assert "query" in caught.value.advice
    assert "gate_proj" not in caught.value.advice
