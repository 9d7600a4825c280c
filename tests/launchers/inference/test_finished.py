"""Lookup of models in folders of runs, in other folders, and by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from estimator.errors import UserError
from launchers.inference import finished
from tests.lab.configs import config


def test_the_folder_of_a_run_is_loaded_as_its_model_with_the_settings_of_the_run(
    model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(config().model_dump(mode="json")))
    for folder in (tmp_path, tmp_path / "model"):
        model = finished.from_folder(folder)
        assert (model.name, model.base, model.is_adapter) == ("tiny-llama-finetuned", "tiny-llama", False)
        assert model.folder == (tmp_path / "model").resolve()
        assert model.spec().layers == 1
    (tmp_path / "settings.yaml").write_text("model: [")
    with pytest.raises(UserError, match=r"settings\.yaml cannot be read"):
        finished.from_folder(tmp_path)


def test_an_adapter_has_the_shape_of_the_base_named_in_its_configuration(
    adapter_dir: Path, model_dir: Path
) -> None:
    model = finished.from_folder(adapter_dir)
    assert model.is_adapter
    assert Path(model.base or "") == model_dir
    assert model.spec().layers == 1


def test_folders_without_a_generative_model_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no model in"):
        finished.from_folder(tmp_path)
    shutil.copytree(model_dir, tmp_path / "reward")
    path = tmp_path / "reward" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(UserError, match="reward model"):
        finished.from_folder(tmp_path / "reward").spec()


def test_a_model_given_by_name_is_downloaded_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = finished.from_name("tiny-llama")
    assert model.folder.is_relative_to(tmp_path.resolve())
    assert model.base_source().kind == "made"
