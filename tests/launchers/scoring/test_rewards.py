"""Rewards from a function of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.dataset.prompts import Prompt
from launchers.scoring.rewards import rewards_of

ASKED = [Prompt(index=n, text="<b>", shown=f"question {n}", tokens=3) for n in range(2)]


def test_a_reward_function_gets_the_prompt_text_and_its_errors_name_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(prompt, answer):\n    return len(prompt) + 1 / len(answer)\n")
    rewards = rewards_of(f"{tmp_path}/f.py:f", "mine.py:f", "cpu", bf16=False)
    assert rewards(ASKED, ["a", "ab"]) == [11, 10.5]
    with pytest.raises(UserError, match=r"Scoring function mine\.py:f raised ZeroDivisionError"):
        rewards(ASKED, ["a", ""])
