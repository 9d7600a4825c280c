"""Pipelines that make images: their networks as published, their names, folders of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models.diffusion import STABLE_DIFFUSION_XL, DiffusionSpec, check_resolution
from estimator.models.reference import ModelRef
from tests.estimator.models.test_unet import CONFIG


def test_each_pipeline_component_has_the_published_parameter_count() -> None:
    assert dict(STABLE_DIFFUSION_XL.components) == {
        "UNet": 2_567_463_684,
        "text encoder (CLIP ViT-L)": 123_060_480,
        "text encoder 2 (OpenCLIP bigG)": 694_659_840,
        "VAE": 83_653_863,
    }
    assert STABLE_DIFFUSION_XL.stored_parameters == 3_468_837_867
    assert STABLE_DIFFUSION_XL.parameters == 2_567_463_684
    unet = STABLE_DIFFUSION_XL.unet
    of_blocks = unet.units * STABLE_DIFFUSION_XL.layer_parameters  # the mean is rounded down
    assert 0 <= unet.parameters - unet.outer_parameters - of_blocks < unet.units


@pytest.mark.parametrize("name", ["stable-diffusion-xl", "SDXL", "stabilityai/stable-diffusion-xl-base-1.0"])
def test_stable_diffusion_xl_is_found_by_name_alias_and_id(name: str) -> None:
    assert models.find(name) is STABLE_DIFFUSION_XL
    assert models.resolve(name).spec is STABLE_DIFFUSION_XL


def test_a_pipeline_shape_survives_json() -> None:
    reference = models.resolve("sdxl")
    assert ModelRef.from_dict(json.loads(json.dumps(reference.to_dict()))) == reference


@pytest.mark.parametrize(("side", "instead"), [(1020, "1024"), (4, "64"), (0, "64"), (4096, "2048")])
def test_an_invalid_image_side_is_refused_with_a_valid_one(side: int, instead: str) -> None:
    with pytest.raises(UserError) as caught:
        check_resolution(side)
    assert f"{side} pixels" in caught.value.problem
    assert instead in caught.value.advice


def test_a_folder_in_diffusers_layout_is_read(tmp_path: Path) -> None:
    spec = models.resolve(str(_pipeline(tmp_path))).spec
    assert isinstance(spec, DiffusionSpec)
    assert [count for _, count in spec.components] == [count for _, count in STABLE_DIFFUSION_XL.components]
    assert spec.resolution == 1024


def test_a_folder_of_another_pipeline_is_refused_with_the_pipelines_name(tmp_path: Path) -> None:
    _write(_pipeline(tmp_path) / "model_index.json", {"_class_name": "FluxPipeline"})
    with pytest.raises(UserError, match="FluxPipeline"):
        models.resolve(str(tmp_path))


def test_a_folder_without_a_unet_config_is_refused(tmp_path: Path) -> None:
    (_pipeline(tmp_path) / "unet" / "config.json").unlink()
    with pytest.raises(UserError, match=r"unet/config\.json"):
        models.resolve(str(tmp_path))


def _pipeline(folder: Path) -> Path:
    """The config.json files of stable-diffusion-xl-base-1.0, as far as they are read."""
    clip = {"vocab_size": 49_408, "max_position_embeddings": 77}
    _write(folder / "model_index.json", {"_class_name": "StableDiffusionXLPipeline"})
    _write(folder / "unet" / "config.json", CONFIG)
    for name, hidden, layers, heads, act in (
        ("text_encoder", 768, 12, 12, "quick_gelu"),
        ("text_encoder_2", 1280, 32, 20, "gelu"),
    ):
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "projection_dim": hidden}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads}
        _write(folder / name / "config.json", clip | sizes | {"hidden_act": act})
    channels = [128, 256, 512, 512]
    _write(folder / "vae" / "config.json", {"block_out_channels": channels, "layers_per_block": 2})
    return folder


def _write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
