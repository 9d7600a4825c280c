"""Shared state of a rank's commands: rank, progress, and objects kept for later commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from checklist.probing.progress import Progress

PIPE, PARENT, DIRECTORY = "CHECKLIST_PIPE", "CHECKLIST_PARENT", "CHECKLIST_DIRECTORY"


class Context:
    """A rank's state between commands."""

    def __init__(self, directory: Path) -> None:
        self.rank = int(os.environ["CHECKLIST_RANK"])
        self.local_rank = int(os.environ["CHECKLIST_LOCAL_RANK"])
        self.node = int(os.environ["CHECKLIST_NODE"])
        self.directory = directory
        self.progress = Progress(directory / f"rank{self.rank}.progress")
        self.stored: dict[
            str, Any
        ] = {}  # objects kept for later commands, e.g. the sink and the process group
