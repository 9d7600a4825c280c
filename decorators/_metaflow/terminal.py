"""On the terminal of the one who launches a run, a step of training takes the place of the step before.

What a task prints comes to the launching process, whose logger shows it line by line, each behind 65
characters that say when and where from. Elsewhere than on a terminal that stays so. (The logger is the
runtime's: ``metaflow.cli``, where it is from, must not be imported before the flow's class is there.)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from metaflow.runtime import NativeRuntime

from launchers.report.terminal import STEP_LINE, StepProgress

_OF_A_POD = re.compile(r"\[[^]]*\] ")  # before each line of a remote job


def renew_steps() -> Callable[[], None]:
    """For the process that launches; what is given back leaves the last step's line where it is."""
    line, made = StepProgress(), NativeRuntime.__init__

    def log_of(show: Callable[..., None]) -> Callable[..., None]:
        def log(body: Any = "", *rest: Any, system_msg: bool = False, **more: Any) -> None:
            text = str(body)
            prefix = _OF_A_POD.match(text)
            text = text[prefix.end() :] if prefix else text
            if not system_msg and STEP_LINE.match(text) and sys.stdout.isatty():
                line.update(text)
            else:
                line.close()
                show(body, *rest, system_msg=system_msg, **more)

        return log

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self._logger = log_of(self._logger)

    NativeRuntime.__init__ = make
    return line.close
