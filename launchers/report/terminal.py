"""Progress bar on a terminal, updated with each training step."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from estimator import terminal

if TYPE_CHECKING:
    from rich.live import Live

STEP_LINE = re.compile(r"step (\d+)/(\d+)  ")  # beginning of each metrics.step_line
_BAR = 24  # columns
_NARROW = 80  # columns; a narrower terminal shows the figures without a bar


class StepProgress:
    """Line at the bottom of the terminal: a progress bar and the figures of the last step.

    Standard output must be a terminal; other output appears above the line.
    """

    def __init__(self) -> None:
        self._live: Live | None = None

    def update(self, line: str) -> None:
        """Show a line of ``metrics.step_line``, truncated at the terminal's width."""
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._live is None:
            console = terminal.console(file=sys.stdout)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        step, total = map(int, match.groups()) if (match := STEP_LINE.match(line)) else (0, 1)
        row = Table.grid(padding=(0, 1))
        figures = Text(line, no_wrap=True, overflow="ellipsis")
        if self._live.console.width < _NARROW:
            row.add_row(figures)
        else:
            row.add_row(ProgressBar(total=total, completed=step, width=_BAR), figures)
        self._live.update(row, refresh=True)

    def close(self) -> None:
        """Stop updating the line; later output appears below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None
