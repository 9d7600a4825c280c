"""Rewards of sampled answers, by a user's function or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from launchers.dataset.prompts import Prompt
from launchers.models import causal
from launchers.scoring.functions import load_function, score_by, scorer_of
from launchers.scoring.reward_model import RewardModel

Rewards = Callable[[Sequence[Prompt], Sequence[str]], list[float]]


def rewards_of(reward: str, name: str, device: str, *, bf16: bool) -> Rewards:
    """Build the function that returns a finite reward for each prompt's answer, or raises UserError.

    Parameters
    ----------
    reward:
        ``file.py:function``, ``module:function`` or a reward model's folder, on this machine.
    name:
        The user's setting, for error messages.
    device:
        Device of a reward model, which every process loads; ``bf16``: in 16 bits.
    """
    if scorer_of(reward).function is not None:
        function = load_function(reward, name)
        return lambda prompts, answers: [
            score_by(function, name, prompt.shown, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    import torch

    folder = Path(reward)
    model = causal.load(folder, dtype=torch.bfloat16 if bf16 else torch.float32).eval().to(device)
    scored = RewardModel(folder, model, name)
    return lambda prompts, answers: scored.rewards(
        [prompt.with_answer(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    )
