"""Engines run the families that they were made for, and refuse every other model in one clear clause."""

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models import hf_config
from launchers import engines
from launchers.settings import Settings

RUN = {
    "torchtune": {"llama", "mistral", "qwen2"},
    "deepspeed": {"llama", "mistral", "mixtral", "qwen2", "qwen3"},
}


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_only_the_families_that_an_engine_was_made_for_are_run(engine: str, family: str) -> None:
    rows = [spec for spec in map(models.find, models.names()) if spec.family == family]
    for spec in rows:
        reason = engines.get(engine).unsupported(Settings(seq_len=256), spec)
        if family not in RUN[engine]:
            assert reason
            assert spec.name in reason
            assert "\n" not in reason
    if family in RUN[engine]:
        assert any(engines.get(engine).unsupported(Settings(seq_len=256), spec) is None for spec in rows)


@pytest.mark.parametrize(("flag", "where"), [("attention_bias", "q, k and v"), ("mlp_bias", "the MLP")])
def test_torchtune_refuses_a_llama_with_biases(flag: str, where: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        flag: True,
    }
    spec = hf_config.to_spec(config, "mine")
    reason = engines.get("torchtune").unsupported(Settings(seq_len=256), spec)
    assert reason
    assert where in reason


@pytest.mark.parametrize("name", ["stable-diffusion-xl", "stabilityai/stable-diffusion-xl-base-1.0"])
def test_a_diffusion_model_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(UserError) as caught:
        models.resolve(name, online=True)
    assert "language models only" in caught.value.problem
    assert "finetune estimate --model stable-diffusion-xl" in caught.value.advice
