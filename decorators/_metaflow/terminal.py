"""On the terminal of the one who launches a run, a step of training takes the place of the step before.

What a task prints comes to the launching process, whose logger shows it line by line, each behind 65
characters that say when and where from. Elsewhere than on a terminal that stays so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from metaflow.parameters import flow_context

from launchers.report.terminal import STEP_LINE, RenewedLine

_OF_A_POD = re.compile(r"\[[^]]*\] ")  # before each line of a remote job


def renew_steps(flow: type[Any]) -> Callable[[], None]:
    """For the process that launches; what is given back leaves the last step's line where it is."""
    with flow_context(flow):  # as the command line gets the flow's configs when it is imported
        from metaflow import cli

    line, show = RenewedLine(), cli.logger

    def log(body: Any = "", system_msg: bool = False, **more: Any) -> None:
        text = str(body)
        prefix = _OF_A_POD.match(text)
        text = text[prefix.end() :] if prefix else text
        if not system_msg and STEP_LINE.match(text) and sys.stdout.isatty():
            line.renew(text)
        else:
            line.close()
            show(body, system_msg, **more)

    cli.logger = log  # read when the command line is parsed
    return line.close
