"""The optimizer and its schedule."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from launchers.engines.loop import optimizer
from launchers.settings import Settings
from tests.launchers.engines.loop import runs


def test_the_schedule_is_that_of_the_job_and_its_steps() -> None:
    job = runs.make_job(
        Path(), Path(), Path(), steps=10, settings={"schedule": {"name": "linear", "warmup_steps": 2}}
    )
    stepped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = optimizer.schedule(job)(stepped), []
    for _ in range(4):
        rates += schedule.get_last_lr()
        stepped.step()
        schedule.step()
    assert rates == [0.0, 0.5, 1.0, 0.875]


def test_a_learning_rate_that_was_not_resolved_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="auto"):
        optimizer.peak_lr(Settings())
    assert math.isclose(optimizer.peak_lr(Settings.model_validate({"optimizer": {"lr": 1e-2}})), 1e-2)
