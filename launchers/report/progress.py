"""The lines of a training: one that is renewed on a terminal, one every so many steps elsewhere."""

from __future__ import annotations

import sys

from launchers.report.metrics import Metrics, step_line
from launchers.report.terminal import RenewedLine


class Progress:
    """Shows the steps of one training on standard output.

    Parameters
    ----------
    total_steps:
        Of the whole run.
    every:
        Steps from one line to the next where standard output is no terminal. The first step that this
        training makes and the last of the run have theirs anyway.
    """

    def __init__(self, *, total_steps: int, every: int) -> None:
        self._total, self._every = total_steps, every
        self._begun = False
        self._line = RenewedLine()

    def step(self, metrics: Metrics, memory_peak_bytes: int | None) -> None:
        """Show a step; on a terminal in the place of the one before."""
        if not sys.stdout.isatty():
            self.close()  # the terminal may have gone (launchers.cluster.hangup)
        line = step_line(metrics, self._total, memory_peak_bytes)
        if sys.stdout.isatty():
            self._line.renew(line)
        elif not self._begun or metrics.step in (self._total, metrics.step // self._every * self._every):
            print(line, flush=True)
        self._begun = True

    def close(self) -> None:
        """Leave the last line where it is; what is printed from now on comes below."""
        self._line.close()
