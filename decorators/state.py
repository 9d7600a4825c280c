"""CardState: everything that a card is drawn from, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from decorators.profile.history import RankRow, StepRow
from decorators.profile.measured import Measured
from decorators.profile.sampling import Sample
from estimator.plan import Plan
from launchers.report.telemetry import Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """A step's record so far. Times are seconds since the epoch."""

    plan: Plan | None
    measured: Measured
    steps: tuple[StepRow, ...]
    ranks: tuple[RankRow, ...]
    memory: tuple[Memory, ...]
    samples: tuple[Sample, ...]
    total_steps: int | None
    eta_seconds: float | None
    phase: str
    started: float
    ended: float | None
    failed: str | None  # the error's text
