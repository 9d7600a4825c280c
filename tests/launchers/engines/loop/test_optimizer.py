"""The learning rate's schedule."""

from __future__ import annotations

import math

import pytest
import torch

from launchers.engines.loop import optimizer
from launchers.settings import Settings


def test_the_cosine_schedule_is_transformers_and_torchtunes() -> None:
    from transformers import get_cosine_schedule_with_warmup

    settings = Settings.model_validate({"schedule": {"warmup_steps": 4}})
    factor = optimizer.lr_factor(settings, 20)
    stepped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    wanted = get_cosine_schedule_with_warmup(stepped, 4, 20)
    for step in range(21):
        assert factor(step) == pytest.approx(wanted.get_last_lr()[0])
        stepped.step()
        wanted.step()


@pytest.mark.parametrize(("name", "middle", "end"), [("linear", 0.5, 0.0), ("constant", 1.0, 1.0)])
def test_the_other_schedules(name: str, middle: float, end: float) -> None:
    factor = optimizer.lr_factor(Settings.model_validate({"schedule": {"name": name, "warmup_steps": 2}}), 10)
    assert [factor(0), factor(1), factor(2), factor(6), factor(10)] == [0.0, 0.5, 1.0, middle, end]


def test_a_learning_rate_that_was_not_resolved_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="auto"):
        optimizer.peak_lr(Settings())
    assert math.isclose(optimizer.peak_lr(Settings.model_validate({"optimizer": {"lr": 1e-2}})), 1e-2)
