"""Worker process that executes a request file and reports user errors to its parent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from estimator.errors import UserError
from launchers.cluster.processes import PARENT, die_with_parent

PROBLEM = "problem.json"  # the user error that ended the process, {"problem", "advice"}, next to the request


Request = TypeVar("Request")


def write_request(path: Path, request: Any) -> Path:
    """Write a request, a dataclass, as JSON into a new or existing folder; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TypeAdapter(type(request)).dump_json(request, indent=1))
    return path


def read_request(kind: type[Request], path: Path) -> Request:
    """Read a request written by :func:`write_request`."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


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
