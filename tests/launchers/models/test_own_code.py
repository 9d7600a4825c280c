"""Models with custom code: refused, or run if trust_remote_code is set, and never at launch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from estimator import models
from estimator.engines import support
from estimator.errors import UserError
from launchers.dataset import render
from launchers.models import causal, own_code, tiny_llama, weights
from launchers.run import checks, preparation
from launchers.settings import Settings, build

pytest.importorskip("transformers")
PACKAGES = ("launchers", "flows", "decorators", "estimator", "checklist")
ROOT = Path(__file__).resolve().parents[3]
TRACE = "trace"  # file that the folder's code appends the name of its process to
CODE = """
import os, sys
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

with open({trace!r}, "a") as trace:
    trace.write(" ".join(sys.argv[:3]) + "\\n")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def no_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def change(path: Path, **values: Any) -> None:
    updated = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in updated.items() if value is not None}))


@pytest.fixture
def custom_model(folder: Path) -> Path:
    """A model and a tokenizer with classes that transformers does not have."""
    (folder / "own.py").write_text(CODE.format(trace=str(folder.parent / TRACE)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder / "config.json", auto_map=auto_map, model_type="own", architectures=["OwnModel"])
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="OwnTokenizer")
    return folder


def ran(folder: Path) -> list[str]:
    """Return the command lines of processes that ran the code of the folder."""
    trace = folder.parent / TRACE
    return trace.read_text().splitlines() if trace.exists() else []


def test_a_model_with_code_is_planned_and_refused_without_running_the_code(custom_model: Path) -> None:
    spec = models.resolve(str(custom_model)).spec
    assert (spec.own_code, spec.parameters) == (True, models.find("tiny-llama").parameters)
    assert "trust_remote_code" in str(support.untested_family_note(spec))
    settings = build({"model": str(custom_model), "method": "full"})
    with pytest.raises(UserError, match="transformers has no class for own models") as caught:
        checks.check_supported(settings, spec)
    assert "--trust-remote-code" in caught.value.advice
    with pytest.raises(UserError, match=r"/config\.json needs code of that folder \(auto_map\)"):
        preparation.fetch_weights(models.resolve(str(custom_model)), custom_model)
    with pytest.raises(ValueError, match="custom code"):
        causal.configuration(custom_model)
    change(custom_model / "config.json", model_type="llama", auto_map=None)
    with pytest.raises(UserError, match=r"/tokenizer_config\.json needs code of that folder"):
        own_code.check_model(custom_model)
    with pytest.raises(UserError, match="cannot be loaded"):
        render.load_tokenizer(custom_model, Settings())
    assert ran(custom_model) == []


def test_trusted_code_runs_only_in_tasks(custom_model: Path) -> None:
    settings = build({"model": str(custom_model), "method": "full", "trust_remote_code": True})
    source = models.resolve(str(custom_model))
    checks.check_supported(settings, source.spec)
    weights.check_model_folder(custom_model)
    preparation.fetch_weights(
        source, custom_model, trust_remote_code=True, runs_code=False
    )  # as it is staged
    assert ran(custom_model) == []
    preparation.fetch_weights(source, custom_model, trust_remote_code=True)
    assert type(causal.load(custom_model, trust_remote_code=True)).__name__ == "OwnModel"
    assert type(render.load_tokenizer(custom_model, settings)).__name__ == "OwnTokenizer"
    assert ran(custom_model)


def test_code_that_transformers_does_not_need_is_not_run(custom_model: Path) -> None:
    change(custom_model / "config.json", model_type="llama")
    change(custom_model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    own_code.check_model(custom_model)
    settings = build({"trust_remote_code": True})
    assert render.load_tokenizer(custom_model, settings).eos_token == tiny_llama.EOT
    assert type(causal.load(custom_model, trust_remote_code=True)).__name__ == "LlamaForCausalLM"
    assert ran(custom_model) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trusted_model_is_trained_on_two_processes_and_its_export_has_the_code(custom_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = custom_model.parent / "out"
    values = {
        "model": str(custom_model),
        "method": "full",
        "trust_remote_code": "true",
        "engine": "fsdp2",
        "resources.gpus": "2",
        "resources.device": "cpu",
        "global_batch_size": "4",
        "seq_len": "64",
        "max_steps": "3",
        "evaluation.generations": "1",
    }
    settings = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    environment = os.environ | {"HF_MODULES_CACHE": str(custom_model.parent / "run"), "OMP_NUM_THREADS": "1"}
    environment |= {"FINETUNE_WORK_DIR": str(custom_model.parent / "work"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "launchers", "--output", str(out), "--no-calibration", *settings],
        cwd=custom_model.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    processes = ran(custom_model)
    assert any("evaluate" in line for line in processes)
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnModel"
    assert (
        type(AutoTokenizer.from_pretrained(out / "model", trust_remote_code=True)).__name__ == "OwnTokenizer"
    )


def test_a_pipeline_with_custom_components_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    components = {"_class_name": "StableDiffusionXLPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    index.write_text(json.dumps(components | {"feature_extractor": [None, None]}))
    own_code.check_pipeline(index)
    index.write_text(json.dumps(components | {"unet": ["own", "Unet"]}))
    with pytest.raises(UserError, match="unet is of 'own'"):
        own_code.check_pipeline(index)


def test_every_call_of_an_auto_class_passes_trust_remote_code() -> None:
    """Without the argument transformers prompts in the terminal."""
    silent = []
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if "from_pretrained" in text else ()
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            automatic = name.endswith(".from_pretrained") and name.split(".")[-2].startswith("Auto")
            if automatic and name != "AutoencoderKL.from_pretrained":
                reported = any(word.arg == "trust_remote_code" for word in call.keywords)
                silent += [] if reported else [f"{path}:{call.lineno}"]
    assert not silent
