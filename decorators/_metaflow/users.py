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
    """Return the run that this task's run was resumed from."""
    from metaflow import current

    origin = current.origin_run_id
    return str(origin) if origin else None


def ensure_user() -> None:
    """Set a user name for Metaflow if the machine provides none, as in a container run by root."""
    if get_username() is None:
        os.environ["USERNAME"] = "local"


def shell_path() -> str | None:
    """Return the PATH of the shell that launched the run; None if this process has the same PATH."""
    return os.environ.get(_SHELL_PATH)


def ensure_python() -> None:
    """Make ``python`` resolve to this interpreter for the run's tasks.

    Metaflow starts the other nodes of a local ``@parallel`` step as ``python``, and a virtual environment
    that was not activated is not on the PATH.
    """
    os.environ.setdefault(_SHELL_PATH, os.environ.get("PATH", ""))
    folder = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *folders])
