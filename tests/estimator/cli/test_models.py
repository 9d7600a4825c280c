"""``finetune models``: what it finds, and its three forms of output."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from estimator import models as table
from estimator.cli.models import models
from estimator.errors import UserError
from tests.estimator.models.hf_configs import config_of


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)


def as_json(capsys: pytest.CaptureFixture[str], search: str | None = None, **options: Any) -> list[Any]:
    models(search, as_json=True, **options)
    found: list[Any] = json.loads(capsys.readouterr().out)
    return found


def listed(capsys: pytest.CaptureFixture[str], search: str | None = None, **options: Any) -> list[str]:
    return [row["name"] for row in as_json(capsys, search, **options)]


def test_all_models_are_listed_with_the_diffusion_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys) == [*table.names(), "stable-diffusion-xl"]


def test_part_of_a_name_alias_or_id_finds_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, "mixtral-8") == ["mixtral-8x7b", "mixtral-8x22b"]
    assert listed(capsys, "EleutherAI/pythia-70m") == ["pythia-70m"]
    assert listed(capsys, "ministral-8b-2410") == ["mistral-8b"]


def test_an_exact_name_finds_only_that_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "phi-4-mini" in listed(capsys, "phi-4-m")
    assert listed(capsys, "phi-4") == ["phi-4"]


def test_models_can_be_filtered_by_family_size_and_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, family="qwen3_moe") == [
        "qwen3-30b-a3b",
        "qwen3-coder-30b-a3b",
        "qwen3-235b-a22b",
    ]
    assert listed(capsys, min_params="400B", moe=False) == ["llama-405b"]
    small = as_json(capsys, max_params="500m")
    assert small
    assert all(row["parameters"] <= 500e6 for row in small)
    assert all(row["experts"] for row in as_json(capsys, moe=True))


def test_csv_has_a_line_and_a_source_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    models("llama-8b", as_csv=True)
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["layers"], row["kv_heads"], row["parameters"]) == ("32", "8", "8030261248")
    assert "meta-llama/Llama-3.1-8B-Instruct" in row["aliases"].split()
    assert row["source"].startswith("https://huggingface.co/meta-llama/Llama-3.1-8B/")


def test_every_license_has_a_source_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    specs = [table.find(name) for name in table.names()]
    assert all(bool(spec.license) == bool(spec.license_source) for spec in specs)
    models("minimax-m2")
    assert "modified-mit" in capsys.readouterr().out


def test_a_single_model_is_shown_with_all_fields_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    models("gpt-oss-20b")
    shown = capsys.readouterr().out
    assert "20,914,757,184" in shown
    assert "arXiv:2508.10925" in shown


def test_a_model_folder_is_shown_like_a_model_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(table.find("qwen3-8b")) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (row,) = as_json(capsys, str(tmp_path))
    assert (row["family"], row["layers"], row["published_parameters"]) == ("qwen3", 2, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"search": "zzz"}, "no model 'zzz'"),
        ({"search": "me/mine"}, "me/mine is neither in the model table nor in the local cache"),
        ({"search": None, "family": "lama"}, "--family lama"),
        ({"search": None, "min_params": "big"}, "--min-params big"),
        ({"search": None, "max_params": "-1"}, "--max-params -1"),
        ({"search": None, "min_params": "5T"}, "No model of the table matches"),
    ],
)
def test_a_search_without_results_prints_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        models(**arguments)
    assert words in caught.value.problem
    assert "\n" not in caught.value.problem


@pytest.mark.parametrize(("name", "family"), [("kimi", "deepseek_v3"), ("glm", "glm4"), ("lama", "llama")])
def test_an_unknown_family_is_answered_with_similar_ones_or_those_of_models_with_that_name(
    name: str, family: str
) -> None:
    with pytest.raises(UserError, match="Did you mean") as caught:
        models(search=None, family=name)
    assert family in caught.value.advice
