"""Runs of a command on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
from collections.abc import Mapping, Sequence
from pathlib import Path


def shown_on_terminal(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, columns: int
) -> tuple[int, str]:
    """Return the exit status and all output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        terminal_environment = {"COLUMNS": str(columns), "TERM": "xterm"}
        os.execve(command[0], list(command), {**environment, **terminal_environment})  # noqa: S606
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # it has ended
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()
