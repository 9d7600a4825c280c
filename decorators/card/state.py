"""State that a step's card is drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decorators.profile.measured import Measured
from decorators.profile.sampling import GpusSample, HostSample
from estimator.plan import Plan
from estimator.rightsizing.usage import Sizes
from launchers.report.state import RunState

if TYPE_CHECKING:  # what every profiled step would otherwise import
    from estimator.rightsizing.recommend import Recommendation
    from launchers.evaluation.result import EvaluationResult
    from launchers.harness.result import HarnessResult
    from launchers.run.trial import TrialResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One hyperparameter as text."""

    name: str
    value: str
    default: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """Record of a step so far. Times are seconds since the epoch."""

    run: RunState  # a snapshot
    measured: Measured
    gpu_samples: tuple[GpusSample, ...]
    host_samples: tuple[HostSample, ...]
    started: float
    ended: float | None
    failed: str | None  # the error's text
    trials: tuple[TrialResult, ...] = ()  # trials before the run, starting with the launched plan
    evaluation: EvaluationResult | None = None
    task_metrics: HarnessResult | None = None
    about: Plan | None = None  # plan of the run, for the title of a step without predictions
    settings: tuple[Setting, ...] = ()
    log_tail: str = ""
    exported: tuple[tuple[str, str], ...] = ()  # rows of (name, value) on the exported step
    requested: Sizes | None = None  # None: not known
    next_request: Recommendation | None = None  # by right-sizing; None for a planned step

    @property
    def plan(self) -> Plan | None:
        """Plan of this attempt; None if nothing was planned."""
        return self.run.plan
