"""The model builders in generated configurations have the right size."""

from __future__ import annotations

from typing import Any

import pytest

from estimator import models
from launchers.engines.torchtune import config as torchtune_config
from launchers.run.job import unsupported
from launchers.settings import Settings
from tests.lab.configs import config
from tests.optional import require_torchtune

pytestmark = pytest.mark.slow


def build(name: str, **settings: Any) -> Any:
    """Build the model on the meta device, without memory."""
    require_torchtune()
    import torch
    from omegaconf import OmegaConf
    from torchtune import config as torchtune

    chosen = config(settings)
    component = torchtune_config.model_component(models.find(name), chosen)
    with torch.device("meta"):
        return torchtune.instantiate(OmegaConf.create(component))


def count(model: Any, trained: bool | None = None) -> int:
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if trained is None or ("lora_" in name) == trained
    )


SUPPORTED = [
    name
    for name in models.names()
    if unsupported("torchtune", Settings(seq_len=2048), models.find(name)) is None
]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_model_of_the_table_has_its_published_number_of_parameters(name: str) -> None:
    spec = models.find(name)
    expected = spec.published_parameters or spec.parameters
    assert count(build(name)) == expected


@pytest.mark.parametrize("name", ["llama-8b", "llama-3.2-1b", "mistral-8b", "codestral", "qwen2.5-7b"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], list(models.PROJECTIONS)])
def test_adapters_have_the_predicted_number_of_parameters(name: str, targets: list[str]) -> None:
    model = build(name, method="lora", lora={"rank": 16, "targets": targets})
    assert count(model, trained=True) == models.find(name).lora_parameters(16, targets)
    assert count(model, trained=False) == models.find(name).parameters
