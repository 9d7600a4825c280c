"""User, flow, run and Python interpreter of this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from metaflow.system_context import system_context
from metaflow.util import get_username

_SHELL_PATH = "FINETUNE_SHELL_PATH"


def flow_name() -> str:
    return str(system_context.flow.name)


def run_id() -> str:
    return str(system_context.run_id)


def origin_run_id() -> str | None:
    """The run that this task's run was resumed from."""
    from metaflow import current

    origin = current.origin_run_id
    return str(origin) if origin else None


def ensure_user() -> None:
    """Give Metaflow a user's name where the machine has none for it, as in a container run by root."""
    if get_username() is None:
        os.environ["USERNAME"] = "local"


def shell_path() -> str | None:
    """Return the PATH of the shell that launched the run; None where this process has it unchanged."""
    return os.environ.get(_SHELL_PATH)


def ensure_python() -> None:
    """Let ``python`` be this interpreter for the run's tasks.

    Metaflow starts a local ``@parallel`` step's other nodes by that name, and a virtual environment that
    is used without being activated is not on the PATH.
    """
    os.environ.setdefault(_SHELL_PATH, os.environ.get("PATH", ""))
    folder = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *folders])
