import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from estimator import models
from estimator.errors import UserError
from launchers.models import tiny_llama
from launchers.models.files import check_complete


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny-llama")


def test_transformers_loads_it_with_every_weight_in_place_and_it_generates(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert str(model.dtype) == "torch.float32"
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = [{"role": "user", "content": "What is a list?"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=5)
    assert answer.shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.parametrize("text", ["def f(x):\n    return x  # ok", "naïve Ω 漢字 🙂\t\r\n  end ", ""])
def test_any_text_is_unchanged_after_encoding_and_decoding(folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_two_processes_write_identical_files(folder: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from launchers.models import tiny_llama; "
    code += "tiny_llama.make(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True, env=environment)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_disk_that_fills_up_during_writing_is_a_user_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of tokenizers is no OSError."""

    def fill(seed: int, config: Mapping[str, Any]) -> None:
        tiny_llama._tokenizer().save("/dev/full")

    monkeypatch.setattr(tiny_llama, "_weights", fill)
    with pytest.raises(UserError, match=rf"No space left on .* for {tmp_path}\.\nFree some space there"):
        tiny_llama.make(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-1.7b"])
def test_a_generated_config_describes_the_model_of_the_catalog(name: str, tmp_path: Path) -> None:
    spec = models.find(name)
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama.config_of(spec)))
    read = models.resolve(str(tmp_path)).spec
    only_in_table = {"name", "hf_id", "gated", "license", "license_source", "published_parameters", "source"}
    for field in fields(spec):
        if field.name not in only_in_table:
            assert getattr(read, field.name) == getattr(spec, field.name), field.name


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-1.7b"])
def test_a_checkpoint_of_another_shape_is_complete_and_has_its_parameter_count(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16, several files, tied head, and matrices with repeated values."""
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(tiny_llama, "_FILE_BYTES", 2**20)
    monkeypatch.setattr(tiny_llama, "_RANDOM_VALUES", 2**16)
    spec = replace(models.find(name), layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=8192)
    folder = tiny_llama.make(tmp_path / "small", config=tiny_llama.config_of(spec))
    check_complete(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters
    embedding = model.get_input_embeddings().weight.flatten()
    assert embedding.numel() == 8192 * 256
    assert torch.equal(embedding[: 2**16], embedding[2**16 : 2**17])
    assert embedding[: 2**16].float().std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen2.5-7b", "qwen3-30b-a3b"])
def test_a_model_of_a_family_that_is_not_generated_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot be generated with random weights"):
        tiny_llama.config_of(models.find(name))
