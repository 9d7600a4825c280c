"""What a rank's commands share: which rank it is, how far it is, what one command leaves for the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from checklist.probes.progress import Progress

PIPE, PARENT, DIRECTORY = "CHECKLIST_PIPE", "CHECKLIST_PARENT", "CHECKLIST_DIRECTORY"


class Context:
    """A rank's state between commands."""

    def __init__(self, directory: Path) -> None:
        self.rank = int(os.environ["CHECKLIST_RANK"])
        self.local_rank = int(os.environ["CHECKLIST_LOCAL_RANK"])
        self.node = int(os.environ["CHECKLIST_NODE"])
        self.directory = directory
        self.progress = Progress(directory / f"rank{self.rank}.progress")
        self.kept: dict[str, Any] = {}  # what a command leaves for later ones: the sink, the process group
