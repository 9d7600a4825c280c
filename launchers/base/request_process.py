"""Worker process that executes a request file and reports user errors to its parent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from estimator.errors import UserError
from launchers.cluster.processes import PARENT, die_with_parent

PROBLEM = "problem.json"  # the user error that ended the process, {"problem", "advice"}, next to the request


def serve(work: Callable[[Path], None]) -> None:
    """Run ``work`` on the request file in ``sys.argv[1]``.

    Writes a UserError to :data:`PROBLEM` and exits with 1.
    """
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    request = Path(sys.argv[1])
    try:
        work(request)
    except UserError as error:
        error_values = {"problem": error.problem, "advice": error.advice}
        request.with_name(PROBLEM).write_text(json.dumps(error_values))
        raise SystemExit(1) from None
