"""Scores of answers by a reward model in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from flows.commands import answers
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from launchers.inference import side_by_side
from tests.launchers.scoring import reward_models


@pytest.mark.slow
def test_a_reward_model_in_a_folder_scores_as_in_training(tmp_path: Path) -> None:
    import torch

    from launchers.models import causal
    from launchers.scoring.reward_model import RewardModel

    folder = reward_models.make(tmp_path)
    answers._check_scorer(str(folder))
    prompts, replies = ["Hello", "What is a kettle?"], ["yes", "A pot."]
    scores = answers._scores_by(str(folder), "cpu")(prompts, replies)
    model = RewardModel(folder, causal.load(folder, dtype=torch.float32).eval(), "it")
    rows = [
        Conversation(messages=(Message(role="user", content=p), Message(role="assistant", content=a)))
        for p, a in zip(prompts, replies, strict=True)
    ]
    assert scores == pytest.approx(model.rewards(rows))
    assert scores[0] != scores[1]


def test_a_scorer_that_is_neither_a_function_nor_a_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a function nor a model folder"):
        answers._check_scorer(str(tmp_path))


def test_long_answers_are_truncated_only_in_the_terminal() -> None:
    row = side_by_side.Row(prompt="Hello", answers=("short", "long " * 200))
    comparison = side_by_side.Comparison(columns=("one", "base"), rows=(row,))
    table = answers.terminal_table(comparison)
    ((prompt, short, long),) = zip(*(column.cells for column in table.columns), strict=True)
    assert (str(prompt), str(short)) == ("Hello", "short")
    assert len(str(long)) < answers.SHOWN + 5
    (_, grid) = answers.page_blocks(comparison)
    assert grid.rows[0][2] == "long " * 200
