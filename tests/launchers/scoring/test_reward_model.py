"""What is taken for a reward model, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from estimator.errors import UserError
from launchers.engines.reward_head import with_reward_head
from launchers.models import tiny_llama
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama with a head whose numbers differ."""
    from safetensors.numpy import load_file, save_file

    base = tmp_path_factory.mktemp("base")
    tiny_llama.make(base)
    folder = with_reward_head(base, Settings(task="reward"), tmp_path_factory.mktemp("reward") / "model")
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        if "score.weight" in weights:
            weights["score.weight"] = np.random.default_rng(0).normal(size=weights["score.weight"].shape)
            weights["score.weight"] = weights["score.weight"].astype(np.float32)
            path.unlink()
            save_file(weights, path, metadata={"format": "pt"})
    return folder


def test_a_model_that_is_no_reward_model_is_refused(tmp_path: Path, reward_model: Path) -> None:
    check_reward_model(reward_model, "rejection.score", "it")
    config = json.loads((reward_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match=r"is no reward model: its config\.json says LlamaForCausalLM"):
        check_reward_model(tmp_path, "rejection.score", "it")
    with pytest.raises(UserError, match="neither a function nor a model folder"):
        check_reward_model(tmp_path / "nowhere", "rejection.score", "it")
