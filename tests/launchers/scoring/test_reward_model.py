"""Recognition of reward models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.scoring.reward_model import check_reward_model
from tests.launchers.scoring import reward_models


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_models.make(tmp_path_factory.mktemp("reward"))


def test_a_model_that_is_not_a_reward_model_is_refused(tmp_path: Path, reward_model: Path) -> None:
    check_reward_model(reward_model, "rejection.score", "it")
    config = json.loads((reward_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match=r"is not a reward model: .* LlamaForCausalLM"):
        check_reward_model(tmp_path, "rejection.score", "it")
    with pytest.raises(UserError, match="neither a function nor a model folder"):
        check_reward_model(tmp_path / "nowhere", "rejection.score", "it")
