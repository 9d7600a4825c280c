"""Files that don't fit their config.json are refused, with the tensors named, before anything is trained."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
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

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
LINEARS = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
EXPERT = {"w1": (16, 8), "w2": (8, 16), "w3": (16, 8)}
MLP = {"gate_proj": (16, 8), "up_proj": (16, 8), "down_proj": (8, 16)}
Shapes = dict[str, tuple[int, ...]]


def shapes_of(family: str, layers: int = 2) -> Shapes:
    """Tensors as the files of this family have them on the Hub."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (32, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (32, 8),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{prefix}{name}.weight": (8,) for name in norms}
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in LINEARS.items()}
        if family == "qwen2":
            shapes |= {f"{prefix}self_attn.{name}.bias": LINEARS[name][:1] for name in list(LINEARS)[:3]}
        if family == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (4,) for name in "qk"}
        if family == "mixtral":
            moe = f"{prefix}block_sparse_moe."
            shapes[f"{moe}gate.weight"] = (4, 8)
            for expert in range(4):
                shapes |= {f"{moe}experts.{expert}.{name}.weight": shape for name, shape in EXPERT.items()}
        else:
            shapes |= {f"{prefix}mlp.{name}.weight": shape for name, shape in MLP.items()}
    return shapes


def write(folder: Path, shapes: Mapping[str, tuple[int, ...]], family: str, **config: Any) -> Path:
    folder.mkdir()
    tensors = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    experts = {"num_local_experts": 4} if family == "mixtral" else {}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **experts, **config}))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_fits(folder)
    assert caught.value.advice
    assert "\n" not in caught.value.problem
    return caught.value.problem


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3"])
def test_the_files_of_families_as_the_hub_has_them_fit(tmp_path: Path, family: str) -> None:
    check_fits(write(tmp_path / "m", shapes_of(family), family))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_files_of_every_family_that_is_run_fit_as_transformers_writes_them(
    tmp_path: Path, family: str
) -> None:
    families.network(family).save_pretrained(tmp_path)
    check_fits(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_that_the_files_lack_are_not_trained_from_random_numbers(tmp_path: Path, family: str) -> None:
    problem = refused(write(tmp_path / "m", shapes_of(family), family, num_hidden_layers=3))
    # of Mixtral's experts there are two tensors, into which they are joined
    assert "9 tensors are missing (model.layers.2.input_layernorm.weight, " in problem
    assert problem.count("model.layers.2.") == 3


def test_layers_that_config_json_lacks_are_not_left_out(tmp_path: Path) -> None:
    problem = refused(write(tmp_path / "m", shapes_of("llama"), "llama", num_hidden_layers=1))
    assert "9 tensors are not used by such a model (model.layers.1.input_layernorm.weight, " in problem


def test_tensors_of_another_shape_are_named_with_both(tmp_path: Path) -> None:
    problem = refused(write(tmp_path / "m", shapes_of("llama"), "llama", intermediate_size=12))
    named = "model.layers.0.mlp.down_proj.weight is [8, 16] instead of [8, 12]"
    assert f"6 tensors are of another shape ({named}, " in problem


def test_one_missing_and_one_unused_tensor_are_both_named(tmp_path: Path) -> None:
    shapes = shapes_of("llama")
    shapes["model.norm.scale"] = shapes.pop("model.norm.weight")
    problem = refused(write(tmp_path / "m", shapes, "llama"))
    assert problem.endswith(
        "1 tensor is missing (model.norm.weight); 1 tensor is not used by such a model (model.norm.scale)."
    )


def without_an_expert(shapes: Shapes) -> None:
    del shapes["model.layers.1.block_sparse_moe.experts.3.w1.weight"]


def with_a_narrow_expert(shapes: Shapes) -> None:
    shapes["model.layers.1.block_sparse_moe.experts.3.w1.weight"] = (12, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_an_expert, "1 tensor is missing"),
        (with_a_narrow_expert, "1 tensor is of another shape"),
    ],
)
def test_a_single_expert_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Shapes], None], said: str
) -> None:
    shapes = shapes_of("mixtral")
    change(shapes)
    problem = refused(write(tmp_path / "m", shapes, "mixtral"))
    assert f"{said} (model.layers.1.block_sparse_moe.experts.3.w1.weight" in problem
    assert "not used" not in problem


def test_fewer_experts_than_config_json_has_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", shapes_of("mixtral"), "mixtral", num_local_experts=8)
    assert "model.layers.0.mlp.experts.gate_up_proj is [4, 32, 8] instead of [8, 32, 8]" in refused(folder)


def test_what_transformers_ignores_or_renames_is_taken(tmp_path: Path) -> None:
    shapes = shapes_of("llama")
    shapes |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (2,) for layer in range(2)}
    check_fits(write(tmp_path / "buffers", shapes, "llama"))
    bare = {name.removeprefix("model."): shape for name, shape in shapes_of("llama").items()}
    check_fits(write(tmp_path / "without_a_prefix", bare, "llama"))


def test_a_tied_head_may_be_left_out_or_be_there_twice_but_not_differ(tmp_path: Path) -> None:
    both = shapes_of("llama")
    one = {name: shape for name, shape in both.items() if name != "lm_head.weight"}
    check_fits(write(tmp_path / "one", one, "llama", tie_word_embeddings=True))
    twice = write(tmp_path / "twice", both, "llama", tie_word_embeddings=True)
    check_fits(twice)
    assert "1 tensor is missing (lm_head.weight)" in refused(write(tmp_path / "untied", one, "llama"))
    tensors = load_file(twice / "model.safetensors")
    save_file({**tensors, "lm_head.weight": -tensors["lm_head.weight"]}, twice / "model.safetensors")
    assert "lm_head.weight that differs from model.embed_tokens.weight" in refused(twice)


def test_a_config_that_transformers_can_not_build_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", shapes_of("llama"), "llama", hidden_size="wide")
    assert re.search(r"config\.json: transformers cannot build a model of it: .*hidden_size", refused(folder))


def test_a_run_refuses_a_folder_whose_config_has_a_layer_more(tmp_path: Path) -> None:
    folder = tiny_llama.make(tmp_path / "model")
    model = locate(str(folder))
    assert preparation.fetch_weights(model, tmp_path / "cache") == folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(UserError, match=r"9 tensors are missing \(model\.layers\.4\."):
        preparation.fetch_weights(model, tmp_path / "cache")


@pytest.mark.parametrize("family", ["helium", "llama"])
def test_of_an_untried_family_what_the_files_hold_is_told_beside_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    families.network(family).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    preparation.fetch_weights(models.resolve(str(tmp_path / "m")), tmp_path / "cache")
    assert ("counted 0.00 B" in capsys.readouterr().out) == (family == "helium")


def test_a_reward_model_fits_as_one_and_as_nothing_else(tmp_path: Path) -> None:
    tiny_llama.make(tmp_path / "base")
    folder = with_reward_head(tmp_path / "base", Settings(task="reward"), tmp_path / "reward")
    check_fits(folder, rewards=True)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        check_fits(folder)
