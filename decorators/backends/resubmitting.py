"""Resubmission after disruptions, which does not count as an attempt of the step.

Metaflow has six attempts of a task at most, and an attempt is for what may be wrong with the task. So the
process that waits for a step submits the same attempt again, until the run's budget is spent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends.disruptions import Disruption, of_run
from decorators.backends.interface import LastWords, Loss
from decorators.backends.registry import BACKENDS

MOST_VARIABLE = "FINETUNE_MAX_DISRUPTIONS"  # of a run; set where it is launched
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
SHORT_S = 600.0  # launches that were shorter are followed by longer and longer waits


@dataclass(kw_only=True)
class Resubmitting:
    """Decides in the process that waits for a step whether what has failed is submitted again."""

    most: int
    """Disruptions of the run."""
    lost: Callable[[WaitedJob, Callable[[], LastWords | None]], Loss | None]
    say: Callable[[str], None] = _metaflow.say
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time
    _began: float = field(default_factory=time.time)
    _short: int = 0  # launches in a row

    def __call__(self, job: WaitedJob) -> bool:
        """Whether the cluster has ended the job, and the budget has room; waits before it says so."""
        try:
            return self._decide(job)
        except Exception as error:  # noqa: BLE001  # how the step has ended is to be told all the same
            self.say(f"Whether {job.what} was taken away can't be told: {type(error).__name__}: {error}")
            return False

    def _decide(self, job: WaitedJob) -> bool:
        run, step, attempt = _metaflow.waited_attempt()
        noted = of_run(run)
        launch = noted.launch(step, attempt)
        loss = self.lost(job, lambda: noted.last_words(step, launch))
        if loss is None:
            return False
        disruption = Disruption(at=self.clock(), lost=loss.lines)
        noted.note(step, disruption)
        number = noted.count()
        if number > self.most:
            self.say(
                f"Disrupted, {disruption.text}: that is more often than --max-disruptions {self.most}; "
                "what follows counts as an attempt."
            )
            return False
        wait_s = self._wait_s()
        self.say(
            f"Disruption {number} of at most {self.most}, {disruption.text}. The step is submitted again "
            f"in {wait_s:.0f} s, and training goes on from its last checkpoint."
        )
        self.sleep(wait_s)
        self._began = self.clock()
        return True

    def _wait_s(self) -> float:
        self._short = self._short + 1 if self.clock() - self._began < SHORT_S else 1
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._short - 1))


def install() -> None:
    """For the process that Metaflow starts for a remote step, where the launch has set a budget."""
    most = int(os.environ.get(MOST_VARIABLE) or 0)
    if not most:
        return
    for name, backend in BACKENDS.items():
        decide = Resubmitting(most=most, lost=backend.lost)
        _metaflow.submit_again(name, decide)
