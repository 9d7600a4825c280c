"""Which shape a name, a Hugging Face id or a directory stands for, without a network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models import hf_files
from tests.estimator.models.hf_configs import config_of

CONFIG = {**config_of(models.find("llama-3.2-1b")), "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub's, and an empty working directory."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hf" / "hub"


def write(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def snapshot(cache: Path, hf_id: str, revision: str, config: object) -> Path:
    return write(cache / f"models--{hf_id.replace('/', '--')}" / "snapshots" / revision, config)


@pytest.mark.parametrize("name", ["llama-8b", "meta-llama/Llama-3.1-8B", "LLAMA_8B"])
def test_names_and_ids_of_the_table_need_no_file(name: str) -> None:
    assert models.resolve(name).spec is models.find("llama-8b")


@pytest.mark.parametrize("written", ["./mine", "mine", "{}/mine"])
def test_a_directory_with_a_config_json_is_read(written: str) -> None:
    write(Path("mine"), CONFIG)
    spec = models.resolve(written.format(Path.cwd())).spec
    assert (spec.layers, spec.hidden) == (3, 2048)


def test_a_table_name_takes_precedence_over_a_folder_of_that_name() -> None:
    write(Path("llama-8b"), CONFIG)
    assert (models.resolve("llama-8b").spec.layers, models.resolve("./llama-8b").spec.layers) == (32, 3)


def test_a_model_in_the_hub_s_cache_is_found_by_its_id(cache: Path) -> None:
    snapshot(cache, "me/mine", "abc", CONFIG)
    spec = models.resolve("me/mine").spec
    assert (spec.name, spec.layers) == ("me/mine", 3)


def test_the_cached_revision_of_main_is_used(cache: Path) -> None:
    for revision, layers in (("abc", 3), ("def", 4), ("fed", 5)):
        folder = snapshot(cache, "me/mine", revision, CONFIG | {"num_hidden_layers": layers})
        os.utime(folder / "config.json", (layers, layers))
    assert models.resolve("me/mine").spec.layers == 5  # no reference: the newest
    reference = cache / "models--me--mine" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("def")
    assert models.resolve("me/mine").spec.layers == 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_hub_cache_folder_is_that_of_huggingface_hub(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(hf_files.hub_cache()) == expected


def test_an_unknown_id_gets_advice_on_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(UserError) as caught:
        models.resolve("me/mine")
    assert "me/mine" in caught.value.problem
    assert str(cache) in caught.value.problem
    assert caught.value.advice == "Fetch its shape: hf download me/mine config.json"


@pytest.mark.parametrize(
    ("name", "words"),
    [("lama-8b", "Did you mean llama-8b"), ("./lama", "config.json"), ("/lama", "config.json")],
)
def test_an_unknown_name_or_path_gets_advice(name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        models.resolve(name)
    assert words in caught.value.advice


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json is not JSON: "),
        ("[1]", "config.json is not a JSON object"),
        (CONFIG | {"model_type": "t5"}, "model_type 't5', which is not supported"),
        ({k: v for k, v in CONFIG.items() if k != "vocab_size"}, "config.json has no vocab_size"),
    ],
)
def test_a_broken_config_json_is_a_one_line_error(config: object, words: str) -> None:
    write(Path("mine"), config)
    with pytest.raises(UserError) as caught:
        models.resolve("./mine")
    assert words in caught.value.problem
    assert "\n" not in caught.value.problem


def test_a_folder_without_a_config_json_is_refused() -> None:
    Path("mine").mkdir()
    with pytest.raises(UserError, match=r"mine has no config\.json"):
        models.resolve("./mine")


@pytest.mark.parametrize(
    ("name", "nearest", "reason"),
    [
        ("qwen3-vl", "Qwen/Qwen3-VL", "by Hugging Face id or folder"),
        ("flux", "stable-diffusion-xl", "diffusion transformer"),
        ("sd-1.5", "stable-diffusion-xl", "UNet of Stable Diffusion XL"),
        ("Stable_Diffusion_3", "stable-diffusion-xl", "UNet of Stable Diffusion XL"),
        ("gpt-4o", "gpt-oss-20b", "not published"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_with_the_nearest_one_and_the_reason(
    name: str, nearest: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        models.find(name)
    assert nearest in caught.value.advice


def test_names_of_unsupported_models_hide_no_model_of_the_table() -> None:
    for prefix, (nearest, _) in models._unsupported().items():
        assert models.known(nearest) or "/" in nearest
        assert prefix == models._normal(prefix)


@pytest.mark.parametrize("suffix", ["", "/", "/tree/main"])
def test_the_address_of_a_models_page_is_refused_with_the_models_id(suffix: str) -> None:
    with pytest.raises(UserError, match=r"https://huggingface\.co/Qwen/Qwen3-8B") as error:
        models.resolve(f"https://huggingface.co/Qwen/Qwen3-8B{suffix}")
    assert error.value.advice == "Use --model Qwen/Qwen3-8B"
    with pytest.raises(UserError, match=r"https://example\.com/model") as error:
        models.resolve("https://example.com/model")
    assert "folder" in error.value.advice
