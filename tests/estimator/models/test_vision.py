"""Vision towers: parameters as transformers builds them, and image tokens by size."""

from __future__ import annotations

import dataclasses
import json

import pytest

from estimator.models import hf_config
from estimator.models.reference import ModelRef
from estimator.models.vision import VisionShape, from_config
from tests import vision_models

IDS = dict.fromkeys(
    (
        *("image_token", "video_token", "vision_bos_token", "vision_eos_token"),
        *("boi_token", "eoi_token", "fake_image_token", "global_image_token", "end_of_utterance_token"),
    ),
    7,
)
# vision_config of google/gemma-3-4b-it and Qwen/Qwen3-VL-8B-Instruct
GEMMA3 = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_tower_parameters_match_transformers(family: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText

    config = vision_models.config_of(family, 300, IDS)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    language = [
        name for name in sizes if any(part in name for part in ("language_model", "text_model", "lm_head"))
    ]
    between = [name for name in sizes if any(part in name for part in ("merger", "projector", "connector"))]
    spec = hf_config.to_spec(json.loads(config.to_json_string()), family)
    assert spec.vision is not None
    assert spec.parameters == sum(sizes[name] for name in language)
    assert spec.vision.projector_parameters == sum(sizes[name] for name in between)
    whole = spec.parameters + spec.vision.parameters + spec.vision.projector_parameters
    assert whole == sum(sizes.values())


def shape(config: dict[str, object], hidden: int) -> VisionShape:
    found = from_config(config, hidden)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "hidden", "size", "tokens", "patches"),
    [
        (GEMMA3, 2560, (896, 896), 256, 4096),
        (GEMMA3, 2560, (2000, 300), 256, 4096),
        (QWEN3_VL, 4096, (1024, 1024), 1024, 4096),
        (QWEN3_VL, 4096, (320, 64), 20, 80),
        (QWEN3_VL, 4096, (8, 8), 1, 4),
    ],
)
def test_image_tokens_follow_the_resolution(
    config: dict[str, object], hidden: int, size: tuple[int, int], tokens: int, patches: int
) -> None:
    tower = shape(config, hidden)
    assert (tower.tokens_of(*size), tower.patches_of(*size)) == (tokens, patches)


def test_published_towers_have_their_published_size() -> None:
    assert shape(GEMMA3, 2560).parameters == pytest.approx(417e6, rel=0.01)  # SigLIP So400m at 896 pixels
    assert shape(QWEN3_VL, 4096).parameters == pytest.approx(415e6, rel=0.02)


def test_a_model_without_a_tower_or_with_unknown_widths_has_no_vision_shape() -> None:
    assert from_config({"model_type": "llama"}, 64) is None
    assert from_config({"model_type": "new", "vision_config": {"hidden_size": 64}}, 64) is None


def test_a_model_with_a_vision_tower_survives_json() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    spec = hf_config.to_spec({**GEMMA3, "text_config": text | {"head_dim": 16}}, "x")
    ref = ModelRef(kind="folder", name="x", location="x", spec=spec)
    assert ModelRef.from_dict(json.loads(json.dumps(ref.to_dict()))) == ref
    assert dataclasses.replace(spec, vision=None) != spec
