"""Memory of vision towers: what is trained, and what images keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import models
from estimator.memory import estimate
from estimator.memory.states import VISION, states
from estimator.models.vision import VisionShape
from estimator.setup import Setup

TOWER = VisionShape(
    layers=27, hidden=1152, ffn=4304, patch=16, merge=2, side=0, tiles=False, tokens=0,
    parameters=400_000_000, projector_parameters=40_000_000,
)  # fmt: skip
SETUP = Setup(model=replace(models.find("llama-8b"), vision=TOWER), engine="fsdp2", image_size=1024)


def tower_bytes(setup: Setup) -> int:
    return states(setup).get(VISION, 0)


def test_text_only_training_has_no_vision_tower_in_memory() -> None:
    assert tower_bytes(SETUP) == 0
    assert VISION not in dict(estimate(SETUP).categories)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_more_of_the_tower_or_more_pixels_takes_more_memory(method: str) -> None:
    setup = replace(SETUP, method=method, vision="frozen")
    assert tower_bytes(setup) > 2 * TOWER.parameters
    trained = replace(setup, vision="lora" if method == "lora" else "full")
    for larger in (trained, replace(setup, images_per_row=4), replace(setup, image_size=2048)):
        assert tower_bytes(larger) > tower_bytes(setup)
    assert tower_bytes(replace(trained, images_per_row=2)) > tower_bytes(trained)
    assert dict(estimate(setup).categories)[VISION] == tower_bytes(setup)
