"""Result of a task on a micro batch, and the divisor of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Token and sequence counts of one global batch, summed over ranks."""

    divisor: int  # of the summed loss and the summed metrics
    tokens: int = 0  # of the chosen conversations that are predicted, prompts too
    good: int = 0  # judged answers that are called good
    quarters: tuple[int, ...] = ()  # images by how noisy they are: those of each quarter of the time steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one micro batch, summed over what :attr:`StepCounts.divisor` counts."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # without gradients
