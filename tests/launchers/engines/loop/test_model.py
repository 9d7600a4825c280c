"""What is trained of a model: which layers get adapters, by the family's own names."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.errors import UserError
from estimator.models import FAMILIES, PROJECTIONS, find, names
from estimator.setup import Setup
from launchers import settings
from launchers.engines.loop import model
from tests.estimator.models.hf_configs import config_of
from tests.estimator.models.test_parameters import built

NO_ADAPTER = {"router", "gate", "shared_expert_gate", "lm_head", "embed_out"}  # heads, and what routes tokens
ONE_OF_EACH_FAMILY = {
    find(name).family: name for name in names() if find(name).causal and find(name).family != "qwen"
}  # Qwen 1's code is its own, on the Hub


def tiny(name: str) -> Any:
    """A network without weights, of two blocks; of three where the first ones have no experts."""
    spec = find(name)
    return built(config_of(spec.with_layers(3 if spec.dense_layers else 2)))


def targets(value: Any) -> settings.Settings:
    return settings.build({"lora": {"targets": value}})


def test_every_causal_family_is_looked_at() -> None:
    causal = {family for family, traits in FAMILIES.items() if traits.causal}
    assert causal - ONE_OF_EACH_FAMILY.keys() <= {"qwen", "ministral"}, "no model of these is in the table"


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY.values(), ids=ONE_OF_EACH_FAMILY.keys())
def test_all_linear_is_every_linear_layer_but_heads_and_routers_and_is_counted_exactly(name: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    network = tiny(name)
    linear = {
        path.rpartition(".")[2] for path, m in network.named_modules() if isinstance(m, torch.nn.Linear)
    }
    found = model.adapted_layers(network, targets("all-linear"))
    assert set(found) == linear - NO_ADAPTER
    assert model.adapted_layers(network, settings.build({})) == found, "the default is all seven names"

    spec = find(name)
    spec = spec.with_layers(3 if spec.dense_layers else 2)
    for method in ("lora", "dora"):
        adapted = get_peft_model(
            tiny(name),
            LoraConfig(r=4, target_modules=found, use_dora=method == "dora"),
            low_cpu_mem_usage=True,
        )
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        setup = Setup(
            model=spec,
            engine="deepspeed",
            method=method,  # type: ignore[arg-type]
            lora_rank=4,
            lora_targets=spec.all_linear,
        )
        assert trained == setup.adapter_parameters


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        ("llama-3.2-1b", ["q_proj", "down_proj"], ["q_proj", "down_proj"]),
        ("phi-3-mini", ["q_proj", "v_proj", "up_proj"], ["qkv_proj", "gate_up_proj"]),
        ("falcon-7b", ["o_proj"], ["dense"]),
        ("mixtral-8x7b", ["v_proj", "up_proj"], ["v_proj"]),
        ("deepseek-v3", ["o_proj", "q_proj"], ["o_proj"]),
        ("phi-2", PROJECTIONS, ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]),
    ],
)
def test_targets_by_llamas_names_are_found_under_the_familys(
    name: str, wanted: list[str], found: list[str]
) -> None:
    assert model.adapted_layers(tiny(name), targets(wanted)) == found


def test_targets_of_which_the_model_has_none_are_refused_with_what_it_has() -> None:
    with pytest.raises(UserError, match="up_proj") as caught:
        model.adapted_layers(tiny("mixtral-8x7b"), targets(["up_proj"]))
    assert "k_proj, lm_head" in (caught.value.advice or "")
