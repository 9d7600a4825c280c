"""Host memory of a node: what loading and saving hold there."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.memory import host_bytes
from estimator.models import find
from estimator.plan import GIB
from estimator.setup import Setup
from tests.estimator.models.hf_configs import with_layers

PROCESS = 3 * GIB


def setup_of(model: str, **values: Any) -> Setup:
    return Setup(model=find(model), **values)


def test_loading_70b_qlora_copies_queries_and_keys_but_not_the_whole_model() -> None:
    step = setup_of("llama-70b", method="lora", quantization="nf4-double")
    copies = 80 * 8192 * (8192 + 1024) * 2  # layers x hidden x rows of q and k, in bf16
    assert host_bytes(step) == PROCESS + copies


@pytest.mark.parametrize("engine", ["torchtune", "deepspeed"])
def test_host_memory_of_a_merge_does_not_depend_on_the_number_of_layers(engine: Any) -> None:
    shallow, deep = (
        host_bytes(
            Setup(model=with_layers(find("qwen2.5-7b"), layers), engine=engine, method="lora", lora_rank=1)
        )
        for layers in (10, 20)
    )
    largest = 152064 * 3584 * 2  # the embedding in bf16
    assert PROCESS + 3 * largest < shallow < deep < PROCESS + 3 * largest + 0.01 * GIB


def test_saving_full_training_gathers_and_converts_the_model_on_the_host() -> None:
    step = setup_of("llama-8b")
    assert host_bytes(step) == PROCESS + 4 * step.model.parameters


def test_each_of_several_fp32_processes_casts_the_complete_model() -> None:
    values: dict[str, Any] = {"method": "lora", "sharding": "fsdp", "shard": 4, "processes_per_node": 4}
    cast, as_it_is = (setup_of("qwen2.5-7b", precision=p, **values) for p in ("fp32", "bf16"))
    assert host_bytes(cast) == 4 * (PROCESS + 4 * cast.model.parameters)
    assert host_bytes(as_it_is) < 4 * PROCESS + 4 * GIB


def test_with_zero_3_one_rank_merges_experts_and_dense_models_stay_mapped() -> None:
    values: dict[str, Any] = {
        "engine": "deepspeed",
        "method": "lora",
        "sharding": "zero3",
        "shard": 8,
        "processes_per_node": 8,
    }
    experts, dense = setup_of("mixtral-8x7b", **values), setup_of("llama-70b", **values)
    assert host_bytes(experts) == 8 * PROCESS + 2 * experts.model.parameters
    assert host_bytes(dense) < 8 * PROCESS + 8 * GIB


def test_the_first_fsdp2_rank_holds_the_quantized_base_until_it_is_distributed() -> None:
    common: dict[str, Any] = {"method": "lora", "engine": "fsdp2", "sharding": "fsdp", "shard": 8}
    found = [
        host_bytes(setup_of("llama-70b", quantization=kind, **common)) for kind in ("nf4-double", "int8")
    ]
    linear = find("llama-70b").linear_parameters
    assert found[1] - found[0] == pytest.approx(linear / 2, rel=0.01)
