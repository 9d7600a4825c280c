"""Result of a task on a micro batch, and the divisor of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Token and sequence counts of one global batch, summed over ranks."""

    divisor: int  # of the summed loss and the summed metrics
    tokens: int = 0  # predicted tokens of the chosen conversations, prompts included
    good: int = 0  # answers judged good
    quarters: tuple[int, ...] = ()  # images in each quarter of the time steps, least noisy first


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one micro batch, summed over what :attr:`StepCounts.divisor` counts."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # without gradients
