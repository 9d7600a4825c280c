"""What a rank's commands share: which rank it is, how far it is, what one command leaves for the next."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from checklist.probes.progress import Progress

Message = dict[str, Any]
PIPE, PARENT, DIRECTORY = "CHECKLIST_PIPE", "CHECKLIST_PARENT", "CHECKLIST_DIRECTORY"


class Worker:
    """A rank's state between commands."""

    def __init__(self, directory: Path, answers: int) -> None:
        self.rank = int(os.environ["CHECKLIST_RANK"])
        self.local_rank = int(os.environ["CHECKLIST_LOCAL_RANK"])
        self.node = int(os.environ["CHECKLIST_NODE"])
        self.directory = directory
        self.progress = Progress(directory / f"rank{self.rank}.progress")
        self.kept: dict[str, Any] = {}  # what a command leaves for later ones: the sink, the process group
        self._answers = os.fdopen(answers, "wb", buffering=0)
        self._answering = threading.Lock()

    def answer(self, message: Message) -> None:
        """Tell the supervisor."""
        with self._answering:
            self._answers.write(json.dumps(message).encode() + b"\n")
