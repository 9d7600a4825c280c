"""Resubmission of jobs after disruptions, without using up attempts of the step.

Metaflow allows at most six attempts of a task, which are meant for failures of the task itself. After a
disruption, the process that waits for a step submits the same attempt again, within the run's budget.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends.disruptions import Disruption, of_run
from decorators.backends.interface import GangEnd, Loss
from decorators.backends.registry import BACKENDS

MAX_DISRUPTIONS_VARIABLE = "FINETUNE_MAX_DISRUPTIONS"  # budget of a run, set at launch
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
SHORT_S = 600.0  # consecutive launches shorter than this are followed by increasing waits


@dataclass(kw_only=True)
class Resubmitting:
    """Decides, in the process that waits for a step, whether a failed job is submitted again."""

    max_disruptions: int
    """Maximum number of disruptions of the run."""
    lost: Callable[[WaitedJob, Callable[[], GangEnd | None]], Loss | None]
    report: Callable[[str], None] = _metaflow.print_line
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time
    _began: float = field(default_factory=time.time)
    _short: int = 0  # consecutive short launches

    def __call__(self, job: WaitedJob) -> bool:
        """Whether to submit the job again: the cluster ended it and the budget is not used up. Waits before
        returning True.
        """
        try:
            return self._decide(job)
        except Exception as error:  # noqa: BLE001  # the step's failure must still be reported
            self.report(f"Checking {job.what} for a disruption failed: {type(error).__name__}: {error}")
            return False

    def _decide(self, job: WaitedJob) -> bool:
        run, step, attempt = _metaflow.waited_attempt()
        noted = of_run(run)
        launch = noted.launch(step, attempt)
        loss = self.lost(job, lambda: noted.gang_end(step, launch))
        if loss is None:
            return False
        disruption = Disruption(at=self.clock(), lost=loss.lines)
        noted.note(step, disruption)
        number = noted.count()
        if number > self.max_disruptions:
            self.report(
                f"Disrupted, {disruption.text}: more than --max-disruptions {self.max_disruptions}; "
                "a retry now counts as an attempt."
            )
            return False
        wait_s = self._wait_s()
        self.report(
            f"Disruption {number} of at most {self.max_disruptions}, {disruption.text}. "
            f"The step is submitted again in {wait_s:.0f} s, and training resumes from its last checkpoint."
        )
        self.sleep(wait_s)
        self._began = self.clock()
        return True

    def _wait_s(self) -> float:
        self._short = self._short + 1 if self.clock() - self._began < SHORT_S else 1
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._short - 1))


def install() -> None:
    """Enable resubmission in the process that waits for a remote step, if the launch set a budget."""
    max_disruptions = int(os.environ.get(MAX_DISRUPTIONS_VARIABLE) or 0)
    if not max_disruptions:
        return
    for name, backend in BACKENDS.items():
        decide = Resubmitting(max_disruptions=max_disruptions, lost=backend.lost)
        _metaflow.submit_again(name, decide)
