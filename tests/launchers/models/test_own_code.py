"""Models whose folder wants to run code: never run, refused in one line, and no question in the terminal."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.dataset import render
from launchers.models import causal, own_code, tiny_llama, weights
from launchers.settings import Settings

pytest.importorskip("transformers")
PACKAGES = ("launchers", "flows", "decorators", "estimator", "checklist")
ROOT = Path(__file__).resolve().parents[3]
CODE = "raise SystemExit('code of the folder was run')\n"


@pytest.fixture(autouse=True)
def own_code_in_the_folder(folder: Path) -> None:
    (folder / "own.py").write_text(CODE)


def change(path: Path, **values: Any) -> None:
    kept = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))


@pytest.mark.parametrize("name", ["OwnTokenizer", None])
def test_a_tokenizer_with_code_is_refused_before_it_is_loaded_and_when_it_is(
    folder: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class=name)
    with pytest.raises(UserError, match=r"tokenizer_config\.json needs code of that folder \(auto_map\)"):
        weights.check_whole(folder)
    with pytest.raises(UserError, match="cannot be loaded"):
        render.load_tokenizer(folder, Settings())


def test_a_configuration_with_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    change(folder / "config.json", auto_map={"AutoConfig": "own.OwnConfig"}, model_type="own")
    with pytest.raises(UserError, match=r"/config\.json needs code of that folder"):
        weights.check_whole(folder)
    with pytest.raises(ValueError, match="custom code"):
        causal.configuration(folder)


def test_code_that_transformers_does_not_need_is_left_alone(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.A"})
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    weights.check_whole(folder)
    assert render.load_tokenizer(folder, Settings()).eos_token == tiny_llama.EOT
    assert causal.load(folder).num_parameters() > 0


def test_a_pipeline_with_components_of_its_own_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    known = {"_class_name": "StableDiffusionXLPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    index.write_text(json.dumps(known | {"feature_extractor": [None, None]}))
    own_code.check_pipeline(index)
    index.write_text(json.dumps(known | {"unet": ["own", "Unet"]}))
    with pytest.raises(UserError, match="unet is of 'own'"):
        own_code.check_pipeline(index)


def test_every_automatic_class_is_told_not_to_run_code() -> None:
    """transformers asks in the terminal where nothing says so."""
    silent = []
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if "from_pretrained" in text else ()
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            automatic = name.endswith(".from_pretrained") and name.split(".")[-2].startswith("Auto")
            if automatic and name != "AutoencoderKL.from_pretrained":
                told = any(word.arg == "trust_remote_code" for word in call.keywords)
                silent += [] if told else [f"{path}:{call.lineno}"]
    assert not silent
