"""A line on the terminal that is renewed, as a training's steps go by."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live

STEP_LINE = re.compile(r"step \d+/\d+  ")  # how each that metrics.step_line makes begins


class RenewedLine:
    """One line of standard output, which is a terminal; what else is printed meanwhile comes above it."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def renew(self, line: str) -> None:
        """Put this in its place, cut at the terminal's width."""
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=Console(file=sys.stdout, highlight=False), auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Leave the last line where it is; what is printed from now on comes below."""
        if self._live is not None:
            self._live.stop()
            self._live = None
