"""Folder and tokenizer of a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launchers.dataset.render import load_tokenizer
from launchers.models import tiny_llama
from launchers.settings import Settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model, Settings())


@pytest.fixture
def base_model(model: Path, tmp_path: Path) -> Path:
    """The model with a base model's tokenizer, without a chat template."""
    folder = Path(shutil.copytree(model, tmp_path / "base"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    config["eos_token"] = tiny_llama.EOS
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
