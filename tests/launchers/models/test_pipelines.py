"""The folder of a pipeline: complete, or refused with the missing parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.models.weights import check_model_folder
from tests.launchers.models.test_weights import pipeline_files


def written(folder: Path) -> Path:
    for name, content in pipeline_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_complete_pipeline_is_accepted(tmp_path: Path) -> None:
    check_model_folder(written(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "unet/config.json",
        "vae/model.safetensors",
        "tokenizer_2/tokenizer_config.json",
        "text_encoder/config.json",
    ],
)
def test_a_missing_component_of_a_pipeline_is_named(tmp_path: Path, name: str) -> None:
    (written(tmp_path) / name).unlink()
    with pytest.raises(UserError, match=name.partition("/")[0]):
        check_model_folder(tmp_path)


def test_truncated_weights_of_a_pipeline_are_named(tmp_path: Path) -> None:
    path = written(tmp_path) / "unet" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"unet/model\.safetensors is truncated"):
        check_model_folder(tmp_path)


def test_a_pipeline_with_only_fp16_variant_files_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path) / "unet" / "model.safetensors"
    path.rename(path.with_name("model.fp16.safetensors"))
    with pytest.raises(UserError, match="no weights in unet"):
        check_model_folder(tmp_path)
