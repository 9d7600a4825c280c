"""Learning rate over the steps of a run, the same for every engine. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launchers.settings.sections import Schedule

WARMUP_STEPS = 5  # default if the settings give neither a number nor a share of the steps


def warmup_steps(schedule: Schedule, total_steps: int) -> int:
    """Return the number of warm-up steps; a share is rounded up, like transformers' get_warmup_steps."""
    if schedule.warmup_ratio is not None:
        return math.ceil(total_steps * schedule.warmup_ratio)
    return WARMUP_STEPS if schedule.warmup_steps is None else schedule.warmup_steps


def lr_factor(schedule: Schedule, total_steps: int) -> Callable[[int], float]:
    """Return a function from a step (0 is the first) to its share of the peak learning rate.

    Linear from 0 over the warm-up, then the chosen shape down to ``min_lr_ratio``, which is reached one step
    after the last. Formulas of transformers' optimization.py: get_cosine_with_min_lr_schedule_with_warmup
    (without a least rate torchtune's get_cosine_schedule_with_warmup too), get_linear_schedule_with_warmup
    and get_wsd_schedule with decay_type="linear" (whose own warm-up begins at the least rate).
    """
    warmup, least = warmup_steps(schedule, total_steps), schedule.min_lr_ratio
    falling = max(0, total_steps - warmup)
    if schedule.name == "wsd":
        falling = min(falling, math.ceil(total_steps * schedule.decay_ratio))
    falls_from = max(warmup, total_steps - falling)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if schedule.name == "constant" or step < falls_from:
            return 1.0
        progress = min(1.0, (step - falls_from) / max(1, falling))
        decay = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
        return decay * (1.0 - least) + least

    return factor
