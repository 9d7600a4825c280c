"""Progress of training on standard output: one updated line on a terminal, else a limited number of lines."""

from __future__ import annotations

import sys
import time
from typing import Literal

from estimator.terminal import print
from launchers.report.metrics import Metrics, step_line
from launchers.report.terminal import StepProgress

LINES = 10  # log lines per run with `log_every: auto`, if the run takes less than LINES * MAX_INTERVAL_S
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 60.0  # limits of the time between two of these log lines


class Progress:
    """Prints the steps of one training on standard output.

    Parameters
    ----------
    total_steps:
        Number of steps of the run.
    interval:
        Steps between two lines if standard output is not a terminal. ``auto``: a tenth of the run, but at
        most one line per second and at least one per minute. The first step of this attempt and the last
        step of the run are always printed.
    """

    def __init__(self, *, total_steps: int, interval: int | Literal["auto"]) -> None:
        self._total, self._interval = total_steps, interval
        self._started = False
        self._printed_step, self._printed_at = 0, 0.0
        self._checkpoint_at = time.monotonic()
        self._line = StepProgress()

    def step(self, metrics: Metrics, memory_peak_bytes: int | None) -> None:
        """Show a step: on a terminal in place of the last one, else as a new line at every interval."""
        if not sys.stdout.isatty():
            self.close()  # the terminal may have been closed (launchers.cluster.hangup)
        if sys.stdout.isatty():
            self._line.update(step_line(metrics, self._total, memory_peak_bytes))
        elif not self._started or metrics.step == self._total or self._is_logged(metrics.step):
            print(step_line(metrics, self._total, memory_peak_bytes), flush=True)
            self._printed_step, self._printed_at = metrics.step, time.monotonic()
        self._started = True

    def _is_logged(self, step: int) -> bool:
        """Whether to print a step that is neither the first nor the last."""
        if self._interval != "auto":
            return step % self._interval == 0
        seconds = time.monotonic() - self._printed_at
        is_due = step - self._printed_step >= self._total / LINES
        return seconds >= MAX_INTERVAL_S or (seconds >= MIN_INTERVAL_S and is_due)

    def prints_checkpoint(self) -> bool:
        """Whether to print a line for a new checkpoint: with ``auto``, at most one per minute."""
        now = time.monotonic()
        if (
            self._interval == "auto"
            and not sys.stdout.isatty()
            and now - self._checkpoint_at < MAX_INTERVAL_S
        ):
            return False
        self._checkpoint_at = now
        return True

    def close(self) -> None:
        """Keep the terminal line; later output appears below it."""
        self._line.close()
