"""A complete checkpoint of tiny-llama, and copies that a test may damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from launchers.models import tiny_llama


@pytest.fixture(scope="module")
def complete_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def folder(complete_model: Path, tmp_path: Path) -> Path:
    """A complete checkpoint that the test may damage."""
    return Path(shutil.copytree(complete_model, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:20], names[20:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder
