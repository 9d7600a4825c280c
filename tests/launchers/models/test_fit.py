"""Files that do not match their config.json are refused, with the tensors named, before training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from estimator import models
from estimator.errors import UserError
from estimator.models import locate
from launchers.engines.reward_head import with_reward_head
from launchers.models import tiny_llama
from launchers.models.fit import check_fits
from launchers.run import preparation
from launchers.settings import Settings
from tests.launchers.engines.loop import families

Tensors = dict[str, np.ndarray[Any, Any]]


def write(folder: Path, family: str, change: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    """Write a model of two layers as transformers does, then change its tensors and its config.json."""
    families.network(family, tie_word_embeddings=False).save_pretrained(folder)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_fits(folder)
    assert caught.value.advice
    assert "\n" not in caught.value.problem
    return caught.value.problem


@pytest.mark.parametrize("family", families.FAMILIES)
def test_files_written_by_transformers_are_accepted_for_every_supported_family(
    tmp_path: Path, family: str
) -> None:
    families.network(family).save_pretrained(tmp_path)
    check_fits(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_files_that_lack_layers_of_the_config_are_refused(tmp_path: Path, family: str) -> None:
    problem = refused(write(tmp_path / "m", family, num_hidden_layers=3))
    # of Mixtral's experts there are two tensors, into which they are joined
    assert "9 tensors are missing (model.layers.2.input_layernorm.weight, " in problem
    assert problem.count("model.layers.2.") == 3


def test_files_with_more_layers_than_the_config_are_refused(tmp_path: Path) -> None:
    problem = refused(write(tmp_path / "m", "llama", num_hidden_layers=1))
    assert "9 tensors are not used by such a model (model.layers.1.input_layernorm.weight, " in problem


def test_tensors_of_another_shape_are_named_with_both_shapes(tmp_path: Path) -> None:
    problem = refused(write(tmp_path / "m", "llama", intermediate_size=12))
    named = "model.layers.0.mlp.down_proj.weight is [64, 96] instead of [64, 12]"
    assert f"6 tensors are of another shape ({named}, " in problem


def rename_norm(tensors: Tensors) -> None:
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")


def test_one_missing_and_one_unused_tensor_are_both_named(tmp_path: Path) -> None:
    assert refused(write(tmp_path / "m", "llama", rename_norm)).endswith(
        "1 tensor is missing (model.norm.weight); 1 tensor is not used by such a model (model.norm.scale)."
    )


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(EXPERT), "1 tensor is missing"),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:12].copy()}),
            "1 tensor is of another shape",
        ),
    ],
)
def test_a_single_expert_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Tensors], Any], reason: str
) -> None:
    problem = refused(write(tmp_path / "m", "mixtral", change))
    assert f"{reason} ({EXPERT}" in problem
    assert "not used" not in problem


def test_fewer_experts_than_config_json_has_are_refused(tmp_path: Path) -> None:
    problem = refused(write(tmp_path / "m", "mixtral", num_local_experts=8))
    assert "model.layers.0.mlp.experts.gate_up_proj is [4, " in problem


def add_buffers(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, dtype=np.float32)


def remove_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("change", [add_buffers, remove_prefix])
def test_tensors_that_transformers_ignores_or_renames_are_accepted(
    tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    check_fits(write(tmp_path / "m", "llama", change))


def test_a_tied_head_may_be_omitted_or_stored_twice_but_must_equal_the_embeddings(tmp_path: Path) -> None:
    def omit(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    def repeat(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    check_fits(write(tmp_path / "one", "llama", omit, tie_word_embeddings=True))
    check_fits(write(tmp_path / "twice", "llama", repeat, tie_word_embeddings=True))
    assert "1 tensor is missing (lm_head.weight)" in refused(write(tmp_path / "untied", "llama", omit))
    differing = refused(write(tmp_path / "differing", "llama", tie_word_embeddings=True))
    assert "lm_head.weight that differs from model.embed_tokens.weight" in differing


def test_a_config_that_transformers_cannot_build_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "llama", hidden_size="wide")
    assert re.search(r"config\.json: transformers cannot build a model of it: .*hidden_size", refused(folder))


def test_a_run_refuses_a_folder_whose_config_has_one_layer_too_many(tmp_path: Path) -> None:
    folder = tiny_llama.make(tmp_path / "model")
    model = locate(str(folder))
    assert preparation.fetch_weights(model, tmp_path / "cache") == folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(UserError, match=r"9 tensors are missing \(model\.layers\.4\."):
        preparation.fetch_weights(model, tmp_path / "cache")


@pytest.mark.parametrize("family", ["helium", "llama"])
def test_a_wrong_parameter_count_of_an_untested_family_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    families.network(family).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    preparation.fetch_weights(models.resolve(str(tmp_path / "m")), tmp_path / "cache")
    assert ("(untested model family)" in capsys.readouterr().out) == (family == "helium")


def test_a_reward_model_is_accepted_as_a_reward_model_only(tmp_path: Path) -> None:
    tiny_llama.make(tmp_path / "base")
    folder = with_reward_head(tmp_path / "base", Settings(task="reward"), tmp_path / "reward")
    check_fits(folder, rewards=True)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        check_fits(folder)
