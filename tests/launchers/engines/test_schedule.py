"""Learning rate schedules, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from estimator.errors import UserError
from launchers import settings
from launchers.engines._schedule import lr_factor
from launchers.settings.sections import Schedule

STEPS = 20


def rates(**schedule: Any) -> list[float]:
    factor = lr_factor(Schedule(**schedule), STEPS)
    return [factor(step) for step in range(STEPS + 1)]


def stepped(make: Callable[[Any], Any]) -> list[float]:
    """Return the rates of a transformers schedule, step by step, for a peak of 1."""
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    expected_rates, rates_seen = make(optimizer), []
    for _ in range(STEPS + 1):
        rates_seen.append(expected_rates.get_last_lr()[0])
        optimizer.step()
        expected_rates.step()
    return rates_seen


@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine_and_linear_schedules_equal_those_of_transformers(warmup: int) -> None:
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    expected_rates = stepped(lambda optimizer: get_cosine_schedule_with_warmup(optimizer, warmup, STEPS))
    assert rates(warmup_steps=warmup) == pytest.approx(expected_rates, abs=1e-12)
    expected_rates = stepped(lambda optimizer: get_linear_schedule_with_warmup(optimizer, warmup, STEPS))
    assert rates(name="linear", warmup_steps=warmup) == pytest.approx(expected_rates, abs=1e-12)


def test_the_cosine_schedule_ends_at_the_minimum_rate_as_in_transformers() -> None:
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    expected_rates = stepped(
        lambda optimizer: get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, STEPS, min_lr_rate=0.1)
    )
    rates_found = rates(warmup_steps=4, min_lr_ratio=0.1)
    assert (rates_found, rates_found[-1]) == (pytest.approx(expected_rates, abs=1e-12), pytest.approx(0.1))


@pytest.mark.parametrize("least", [0.0, 0.2])
def test_wsd_equals_the_transformers_schedule_with_linear_decay(least: float) -> None:
    from transformers import get_wsd_schedule

    expected_rates = stepped(
        lambda optimizer: get_wsd_schedule(
            optimizer, 4, 5, num_training_steps=STEPS, decay_type="linear", min_lr_ratio=least
        )
    )
    rates_found = rates(name="wsd", warmup_steps=4, decay_ratio=0.25, min_lr_ratio=least)
    after = 4 if least else 0  # transformers' warm-up begins at the least rate, ours at 0
    assert (rates_found[after:], rates_found[4:16]) == (
        pytest.approx(expected_rates[after:], abs=1e-12),
        [1.0] * 12,
    )


def test_a_constant_rate_stays_at_the_peak() -> None:
    assert rates(name="constant", warmup_steps=2) == [0.0, 0.5, *[1.0] * (STEPS - 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_warmup_ratio_equals_the_corresponding_number_of_steps(name: str) -> None:
    assert rates(name=name, warmup_ratio=0.15) == rates(name=name, warmup_steps=3)
    assert rates(name=name, warmup_ratio=0.11) == rates(name=name, warmup_steps=3), "rounded up"
    assert rates(name=name) == rates(name=name, warmup_steps=5), "the default"


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_a_warm_up_as_long_as_the_run_lasts_until_its_end(name: str) -> None:
    assert rates(name=name, warmup_ratio=1.0)[:STEPS] == [step / STEPS for step in range(STEPS)]
    assert rates(name=name, warmup_steps=STEPS + 10)[STEPS] < 1


def test_warmup_steps_together_with_warmup_ratio_is_refused() -> None:
    with pytest.raises(UserError, match="warmup_steps and warmup_ratio"):
        settings.build({"schedule": {"warmup_steps": 3, "warmup_ratio": 0.1}})
    chosen = settings.build({"schedule": {"warmup_ratio": 0.1}})
    assert settings.Settings.model_validate_json(chosen.model_dump_json()) == chosen
