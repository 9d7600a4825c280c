"""Jobs that torchtune does not support, and the generated YAML."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from estimator import models
from estimator.errors import UserError
from launchers.engines.torchtune import config as torchtune_config
from launchers.models import tiny_llama
from launchers.run.job import unsupported
from launchers.settings import Settings
from tests.launchers.engines.loop import runs


def reason(model: str = "llama-8b", **settings: Any) -> str | None:
    return unsupported("torchtune", Settings.model_validate(settings), models.find(model))


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_dense_models_are_supported_with_every_method(method: str) -> None:
    for model in ("tiny-llama", "llama-8b", "llama-3.2-1b", "mistral-8b", "codestral"):
        assert reason(model, method=method) is None


@pytest.mark.parametrize(
    ("model", "settings", "word"),
    [
        ("mixtral-8x7b", {}, "mixture-of-experts"),
        ("qwen3-8b", {}, "qwen3"),
        ("mistral-nemo-12b", {}, "head_dim"),
        ("mistral-7b-v0.1", {"seq_len": 8192}, "sliding-window"),
        ("llama-8b", {"precision": "bf16-mixed"}, "master weights"),
        ("llama-8b", {"method": "lora", "lora": {"targets": ["q_proj", "up_proj"]}}, "gate_proj"),
        (
            "llama-8b",
            {"method": "lora", "lora": {"targets": ["gate_proj", "up_proj", "down_proj"]}},
            "q_proj",
        ),
        ("smollm2-135m", {"method": "qlora"}, "16384"),
        ("llama-8b", {"engine_options": {"batch_size": 3}}, "micro_batch_size"),
        ("llama-8b", {"engine_options": {"optimizer_in_bwd": True}}, "optimizer_in_bwd"),
    ],
)
def test_unsupported_torchtune_jobs_are_explained_in_one_clause(
    model: str, settings: dict[str, Any], word: str
) -> None:
    refusal = reason(model, **settings)
    assert refusal is not None
    assert word in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(("processes", "fits"), [(1, True), (2, True), (4, False)])
def test_nf4_weights_are_sharded_at_block_boundaries_only(processes: int, fits: bool) -> None:
    refusal = reason("tiny-llama", method="qlora", resources={"gpus": processes})
    assert (refusal is None) == fits
    assert reason("llama-70b", method="qlora", resources={"gpus": 8, "nodes": 4}) is None
    assert reason("mistral-7b-v0.1", seq_len=4096) is None, "a window as long as the sequence"


def test_rotary_scaling_that_the_model_builders_do_not_support_is_refused() -> None:
    spec = models.find("llama-8b")
    yarn = dataclasses.replace(spec, rope_scaling_type="yarn")
    other = dataclasses.replace(spec, rope_original_max_seq_len=4096)
    assert "yarn" in str(unsupported("torchtune", Settings(), yarn))
    assert "4096" in str(unsupported("torchtune", Settings(), other))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return runs.make_data(tmp_path / "data", runs.documents(24), batch=4, steps=6)


def config(tmp_path: Path, model: Path, data: Path, *, steps: int = 6, **options: Any) -> dict[str, Any]:
    shape = {"world": 1, "accumulation": 2, "engine": "torchtune", "sharding": "fsdp"} | options
    job = runs.make_job(tmp_path / "job", model, data, steps=steps, **shape)
    values = torchtune_config.recipe_config(job)
    return dict(yaml.safe_load(yaml.safe_dump(values)))  # as it is written


def test_every_setting_reaches_the_recipe_yaml(tmp_path: Path, model: Path, data: Path) -> None:
    settings = {
        "method": "qlora",
        "seed": 7,
        "compile": True,
        "clip_grad_norm": 0.5,
        "precision": "bf16",
        "optimizer": {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6},
        "schedule": {"name": "linear", "warmup_steps": 3},
        "lora": {"rank": 4, "alpha": 12, "dropout": 0.1, "targets": ["q_proj", "o_proj"]},
    }
    layout: dict[str, Any] = {"precision": "bf16", "activation_checkpointing": True}
    values = config(tmp_path, model, data, settings=settings, **layout)
    assert (values["seed"], values["compile"], values["clip_grad_norm"]) == (7, True, 0.5)
    assert (values["batch_size"], values["gradient_accumulation_steps"]) == (2, 2)
    assert (values["dtype"], values["enable_activation_checkpointing"]) == ("bf16", True)
    assert values["optimizer"] == {
        "_component_": "torch.optim.AdamW",
        "lr": 1e-4,
        "weight_decay": 0.1,
        "betas": [0.8, 0.99],
        "eps": 1e-6,
        "fused": False,
    }
    assert (values["lr_scheduler"]["name"], values["lr_scheduler"]["warmup_steps"]) == ("linear", 3)
    lora = values["model"]
    assert lora["_component_"] == "torchtune.models.llama3.lora_llama3"
    assert lora["lora_attn_modules"] == ["q_proj", "output_proj"]
    assert (lora["lora_rank"], lora["lora_alpha"], lora["lora_dropout"]) == (4, 12, 0.1)
    assert (lora["apply_lora_to_mlp"], lora["quantize_base"]) == (False, True)


def test_the_gradient_norm_is_measured_without_clipping(tmp_path: Path, model: Path, data: Path) -> None:
    assert config(tmp_path, model, data, settings={"clip_grad_norm": None})["clip_grad_norm"] == "inf"


def test_engine_overrides_take_precedence_in_the_recipe_yaml(tmp_path: Path, model: Path, data: Path) -> None:
    engine = {
        "optimizer": {"amsgrad": True, "eps": 1.0},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "profiler": {"enabled": True},
    }
    values = config(tmp_path, model, data, settings={"engine_options": engine})
    assert values["optimizer"]["amsgrad"] is True
    assert (values["optimizer"]["eps"], values["optimizer"]["lr"]) == (1.0, 1e-2)
    assert values["loss"] == {"_component_": "torch.nn.CrossEntropyLoss"}
    assert values["profiler"]["_component_"] == "torchtune.training.setup_torch_profiler"


@pytest.mark.parametrize(
    ("method", "world", "name"),
    [
        ("full", 1, "full_finetune_single_device"),
        ("full", 2, "full_finetune_distributed"),
        ("lora", 1, "lora_finetune_single_device"),
        ("qlora", 4, "lora_finetune_distributed"),
    ],
)
def test_method_and_world_size_choose_the_recipe(tmp_path: Path, method: str, world: int, name: str) -> None:
    options: dict[str, Any] = {"engine": "torchtune", "settings": {"method": method}}
    job = runs.make_job(tmp_path, tmp_path, tmp_path, steps=1, world=world, **options)
    assert torchtune_config.recipe_name(job) == name


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"accumulation": 1}, "global batch of 4"), ({"steps": 7}, "prepared for 6 steps")],
)
def test_data_prepared_for_another_batch_or_fewer_steps_is_refused(
    tmp_path: Path, model: Path, data: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        config(tmp_path, model, data, **options)


def test_a_pad_id_beyond_the_vocabulary_is_not_embedded(tmp_path: Path, model: Path, data: Path) -> None:
    info = json.loads((data / "info.json").read_text())
    (data / "info.json").write_text(json.dumps(info | {"pad_id": 4096}))
    assert config(tmp_path, model, data)["tokenizer"]["pad_id"] == 0


def test_a_config_that_the_checkpointer_cannot_read_is_named(tmp_path: Path, model: Path, data: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    values = json.loads((folder / "config.json").read_text())
    del values["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="no num_key_value_heads"):
        config(tmp_path, folder, data)


def test_a_model_without_safetensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        torchtune_config.weight_files(tmp_path)


def test_sharded_weights_are_read_from_the_index_not_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"b": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}}'
    )
    (tmp_path / "consolidated.safetensors").touch()
    assert torchtune_config.weight_files(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
