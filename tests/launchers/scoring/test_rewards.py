"""Rewards by a function, as a job names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.dataset.prompts import Prompt
from launchers.scoring.rewards import rewards_of

ASKED = [Prompt(index=n, text="<b>", shown=f"question {n}", tokens=1) for n in range(2)]


def test_a_function_gets_each_prompt_as_a_person_sees_it_and_its_answer(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(prompt, answer):\n    return len(prompt) + len(answer) / 100\n")
    rewards = rewards_of(f"{tmp_path}/f.py:f", "shown", "cpu", bf16=False)
    assert rewards(ASKED, ["a", "abc"]) == [10.01, 10.03]


def test_a_function_that_raises_in_a_step_is_named_as_the_user_called_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(prompt, answer):\n    return 1 / len(answer)\n")
    rewards = rewards_of(f"{tmp_path}/f.py:f", "mine.py:f", "cpu", bf16=False)
    with pytest.raises(UserError, match=r"Scoring function mine\.py:f raised ZeroDivisionError"):
        rewards(ASKED, ["a", ""])
