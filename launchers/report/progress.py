"""The lines of a training: one that is renewed on a terminal, one every so many steps elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from launchers.report.metrics import Metrics, step_line

if TYPE_CHECKING:
    from rich.live import Live


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
        self._live: Live | None = None

    def step(self, metrics: Metrics, memory_peak_bytes: int | None) -> None:
        """Show a step; on a terminal in the place of the one before, with the memory."""
        if not sys.stdout.isatty():
            self.close()  # the terminal may have gone (launchers.cluster.hangup)
        if sys.stdout.isatty():
            self._renew(step_line(metrics, self._total, memory_peak_bytes))
        elif not self._begun or metrics.step in (self._total, metrics.step // self._every * self._every):
            print(step_line(metrics, self._total), flush=True)
        self._begun = True

    def close(self) -> None:
        """Leave the last line where it is; what is printed from now on comes below."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _renew(self, line: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:  # whatever else is printed while it is there comes above it
            self._live = Live(console=Console(file=sys.stdout, highlight=False), auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
