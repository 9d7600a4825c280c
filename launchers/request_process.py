"""A process that does what a request says, and leaves for its parent what the user can mend."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from estimator.errors import UserError, spelled_as
from launchers.cluster.processes import PARENT, die_with_parent
from launchers.spelling import SET

PROBLEM = "problem.json"  # {"problem", "advice"}, beside the request: why the process has ended


def serve(work: Callable[[Path], None]) -> None:
    """What such a process does: ``work`` on the request; a UserError in it is left for the parent."""
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    request = Path(sys.argv[1])
    try:
        with spelled_as(SET):
            work(request)
    except UserError as error:
        said = {"problem": error.problem, "advice": error.advice}
        request.with_name(PROBLEM).write_text(json.dumps(said))
        raise SystemExit(1) from None
