"""Trained layers of a model: adapter targets by the names of the family."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.models import FAMILIES, PROJECTIONS, ModelSpec, find, hf_config, names
from estimator.setup import Setup
from launchers import settings
from launchers.engines.loop import model
from launchers.gang.job import TrainJob
from launchers.models import causal
from tests.estimator.models.hf_configs import config_of, with_layers
from tests.estimator.models.test_parameters import built
from tests.launchers.engines.loop import families, runs

# Output heads, routers, and gates of attention heads
NO_ADAPTER = {"router", "gate", "shared_expert_gate", "lm_head", "embed_out", "g_proj"}
ONE_OF_EACH_FAMILY = {
    find(name).family: name for name in names() if find(name).causal and find(name).family != "qwen"
}  # Qwen 1's code is its own, on the Hub


# Families of which no model has sourced figures in the table
UNLISTED = {"qwen", "ministral", "olmo3", "seed_oss", "hunyuan_v1_dense", "lfm2", "granitemoehybrid"}


def some_layers(name: str) -> ModelSpec:
    """Return two blocks of a model: three where the first has no experts, six where the sixth is global."""
    spec = find(name)
    return with_layers(spec, 6 if spec.global_head_dim else 3 if spec.dense_layers else 2)


def tiny(name: str) -> Any:
    """Return a network without weights."""
    return built(config_of(some_layers(name)))


def targets(value: Any) -> settings.Settings:
    return settings.build({"lora": {"targets": value}})


def test_every_causal_family_is_covered() -> None:
    causal = {family for family, traits in FAMILIES.items() if traits.causal}
    assert causal - ONE_OF_EACH_FAMILY.keys() <= UNLISTED


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY.values(), ids=ONE_OF_EACH_FAMILY.keys())
def test_all_linear_adapts_every_linear_layer_but_heads_and_routers_and_is_counted_exactly(name: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    network = tiny(name)
    linear = {
        path.rpartition(".")[2] for path, m in network.named_modules() if isinstance(m, torch.nn.Linear)
    }
    layers = model.adapted_layers(network, targets("all-linear"))
    traits = FAMILIES[find(name).family]
    excluded = {"gate_proj", "up_proj", "down_proj"} if traits.mlp_names_are_experts else set()
    excluded |= {"wq_b", "wk", "weights_proj"}  # indexers of sparse attention
    excluded |= {"o_a_proj"}  # grouped, which PEFT cannot adapt
    if traits.recurrence == "mamba2":
        excluded |= {"out_proj"}  # its kernel reads the weight past an adapter
    assert set(layers) == linear - NO_ADAPTER - excluded
    assert model.adapted_layers(network, settings.build({})) == layers, "the default is all seven names"

    spec = some_layers(name)
    for method in ("lora", "dora"):
        adapted = get_peft_model(
            tiny(name),
            LoraConfig(r=4, target_modules=layers, use_dora=method == "dora"),
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
    ("name", "targets_given", "expected"),
    [
        ("llama-3.2-1b", ["q_proj", "down_proj"], ["q_proj", "down_proj"]),
        ("phi-3-mini", ["q_proj", "v_proj", "up_proj"], ["qkv_proj", "gate_up_proj"]),
        ("falcon-7b", ["o_proj"], ["dense"]),
        ("mixtral-8x7b", ["v_proj", "up_proj"], ["v_proj"]),
        ("deepseek-v3", ["o_proj", "q_proj"], ["o_proj"]),
        ("phi-2", PROJECTIONS, ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]),
    ],
)
def test_targets_with_llama_names_are_translated_to_the_names_of_the_family(
    name: str, targets_given: list[str], expected: list[str]
) -> None:
    assert model.adapted_layers(tiny(name), targets(targets_given)) == expected


def test_targets_that_the_model_lacks_are_refused_with_its_available_targets() -> None:
    with pytest.raises(UserError, match="up_proj") as caught:
        model.adapted_layers(tiny("mixtral-8x7b"), targets(["up_proj"]))
    assert "k_proj, lm_head" in (caught.value.advice or "")


WITH_EXPERTS = [
    name
    for name in families.FAMILIES
    if name in ONE_OF_EACH_FAMILY and find(ONE_OF_EACH_FAMILY[name]).experts
]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_expert_adapters_are_counted_exactly_and_all_are_trained(tmp_path: Path, family: str) -> None:
    import torch
    from peft import PeftModel

    tokens = torch.arange(3, 33)[None]
    families.network(family).save_pretrained(tmp_path / "base")
    adapted = model.made_trainable(causal.load(tmp_path / "base"), job_on_experts(tmp_path))
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    spec = hf_config.to_spec(json.loads((tmp_path / "base" / "config.json").read_text()), family)
    setup = Setup(
        model=spec,
        engine="fsdp2",
        method="lora",
        lora_rank=4,
        lora_targets=spec.all_linear,
        lora_experts=True,
    )
    assert sum(each.numel() for each in trained.values()) == setup.adapter_parameters
    assert setup.adapter_parameters > replace(setup, lora_experts=False).adapter_parameters

    for each in trained.values():
        torch.nn.init.normal_(each, std=0.05)
    adapted(tokens).logits.square().sum().backward()
    assert [name for name, each in trained.items() if each.grad is None or not each.grad.any()] == []
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = adapted.eval()(tokens).logits
        reloaded_model = PeftModel.from_pretrained(
            causal.load(tmp_path / "base"), str(tmp_path / "adapter")
        ).eval()
        assert torch.equal(reloaded_model(tokens).logits, logits)
        merged = adapted.merge_and_unload().eval()(tokens).logits
    assert torch.allclose(merged, logits, atol=1e-5)


def job_on_experts(folder: Path) -> TrainJob:
    lora = {"rank": 4, "targets": "all-linear", "experts": True}
    return runs.make_job(folder, folder, folder, steps=1, settings={"method": "lora", "lora": lora})


def test_expert_adapters_keep_a_copy_of_the_experts_for_the_backward_pass(tmp_path: Path) -> None:
    """The estimate adds this copy to each block that is not recomputed."""
    import torch

    def keep_copy(experts: bool) -> int:
        network = families.network("mixtral")
        job = job_on_experts(tmp_path)
        lora = job.settings.lora.model_copy(update={"experts": experts})
        settings = job.settings.model_copy(update={"lora": lora})
        adapted = model.made_trainable(network, dataclasses.replace(job, settings=settings))
        storages = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = (tensor, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = adapted(torch.arange(3, 7)[None]).logits
        adapter_storages = {each.untyped_storage().data_ptr() for each in adapted.parameters()}
        assert logits.requires_grad
        return sum(size for pointer, (_, size) in storages.items() if pointer not in adapter_storages)

    experts = sum(
        each.numel() * each.element_size()
        for name, each in families.network("mixtral").named_parameters()
        if ".experts." in name
    )
    assert keep_copy(True) - keep_copy(False) == pytest.approx(experts, rel=0.05)
