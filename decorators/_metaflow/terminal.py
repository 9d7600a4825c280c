"""Progress display: on the launching terminal, each training step's line replaces the previous one.

The launching process logs the output of a task line by line with a prefix of 65 characters (time and task).
If the output is not a terminal this is unchanged. The runtime's logger is patched, because ``metaflow.cli``,
which creates it, must not be imported before the flow's class exists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from metaflow.runtime import NativeRuntime

from launchers.report.terminal import STEP_LINE, StepProgress

Log = Callable[..., None]  # Metaflow's logger, called with a line and keywords
POD_PREFIX = re.compile(r"\[[^]]*\](?: |$)")  # of each line of a remote job


def wrap_log(log_of: Callable[[Log], Log]) -> None:
    """Replace the runtime's logger by ``log_of(logger)`` in the launching process."""
    init = NativeRuntime.__init__

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._logger = log_of(self._logger)

    NativeRuntime.__init__ = make


def renew_steps() -> Callable[[], None]:
    """Enable the display in the launching process; the returned function keeps the last step's line."""
    line = StepProgress()

    def log_of(show: Log) -> Log:
        def log(body: Any = "", *args: Any, system_msg: bool = False, **options: Any) -> None:
            text = str(body)
            prefix = POD_PREFIX.match(text)
            text = text[prefix.end() :] if prefix else text
            if not system_msg and STEP_LINE.match(text) and sys.stdout.isatty():
                line.update(text)
            else:
                line.close()
                show(body, *args, system_msg=system_msg, **options)

        return log

    wrap_log(log_of)
    return line.close
