"""The cause of a failed run, found in the log of its tasks.

After a task's error message Metaflow's scheduler prints lines of its own, which name no cause: that the
workflow failed, that the step with that task failed, or that the terminal step was not successful. The
launching process keeps the task's message and prints it last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decorators._metaflow.terminal import POD_PREFIX, Log, wrap_log

_TASK = re.compile(r"\[[^/]+/(?P<step>[^/]+)/\S+ \(pid \d+\)\]")
_STARTS, _FAILED, _FINISHED = "Task is starting", "Task failed", "Task finished successfully"
_MAX_LINES = 2  # of a message: problem and advice


@dataclass
class _TaskLog:
    """Message of one process of a task, from the lines it has printed so far."""

    headline: str = ""
    message: list[str] = field(default_factory=list)
    last_line: str = ""
    open: bool = False  # the next line belongs to the message

    @property
    def lines(self) -> list[str]:
        """Headline and message as lines; empty without a message."""
        if not self.message:
            return []
        problem, *advice = self.message
        return [f"{self.headline} {problem}", *advice]

    def add(self, line: str, headlines: Sequence[str]) -> None:
        if line.startswith(_STARTS):  # of a resubmitted job, too
            self.headline, self.message, self.open = "", [], False
        elif self.open:
            self.message += [line] if line else []
            self.open = bool(line) and len(self.message) < _MAX_LINES
        elif not self.headline and line.removesuffix(":") in headlines and line.endswith(":"):
            self.headline, self.open = line, True
        self.last_line = line or self.last_line


class FailureCause:
    """Message of the task that failed last, from the log lines of a run's tasks.

    A message is the first block of lines below one of ``headlines`` in the log of the task's last launch. If
    there is none, the cause is the task's last line: of a traceback, the exception. If the scheduler itself
    fails before it reports a failed task (S3 is unavailable), the message of an unfinished task counts.
    """

    def __init__(self, headlines: Sequence[str]) -> None:
        self._headlines = headlines
        self._tasks: dict[str, _TaskLog] = {}
        self._cause: list[str] = []

    @property
    def lines(self) -> list[str]:
        """Lines to print; empty if no task has failed."""
        return self._cause or next((log.lines for log in self._tasks.values() if log.message), [])

    def add(self, head: str, text: str, *, system: bool) -> None:
        """Add one line of the log: Metaflow's ``head`` names the task, ``system`` marks Metaflow's lines."""
        task = _TASK.match(head)
        if task is None:
            return
        if not system:
            line = POD_PREFIX.sub("", text, count=1).strip()
            self._tasks.setdefault(head, _TaskLog()).add(line, self._headlines)
        elif text.startswith(_FAILED):
            log = self._tasks.pop(head, _TaskLog())
            failed = f"Step {task['step']} failed"
            self._cause = log.lines or [f"{failed}: {log.last_line}" if log.last_line else f"{failed}."]
        elif text.startswith(_STARTS):
            self._cause = []
        elif text.startswith(_FINISHED):
            self._tasks.pop(head, None)


def collect_cause(headlines: Sequence[str]) -> FailureCause:
    """Collect the cause from the log of the run that this process launches."""
    cause = FailureCause(headlines)

    def log_of(show: Log) -> Log:
        def log(body: Any = "", *args: Any, head: str = "", system_msg: bool = False, **options: Any) -> None:
            cause.add(head, str(body), system=system_msg)
            show(body, *args, head=head, system_msg=system_msg, **options)

        return log

    wrap_log(log_of)
    return cause
