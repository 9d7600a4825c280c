"""Check that a scoring function returns a number for a sample, before a run requests resources.

``python -m launchers.scoring.check request.json`` calls it in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from estimator.errors import UserError
from launchers.base.request_process import PROBLEM, serve
from launchers.scoring.functions import load_function, score_by

SAMPLE = ("What is Python's `abc` module for?", "Abstract base classes.")  # a prompt and an answer
CHECK_S = 120.0  # time limit of a function for the sample, including imports


def check_function(function: str) -> None:
    """Raise UserError if a function does not exist, or returns no finite number for a sample.

    It is called in a separate process whose output is discarded.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "check.json"
        request.write_text(json.dumps({"function": function}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            result = subprocess.run(
                [sys.executable, "-m", "launchers.scoring.check", str(request)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_S,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"Scoring function {function}: no score for a sample within {CHECK_S:g} s.",
                "Use a faster function.",
            ) from None
        problem = request.with_name(PROBLEM)
        if problem.is_file():
            raise UserError(**json.loads(problem.read_text()))
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise UserError(f"Scoring function {function} has ended its process: {last}")


def main(path: Path) -> None:
    """Try the request's function in this process."""
    function = json.loads(path.read_text())["function"]
    score_by(load_function(function, function), function, *SAMPLE)


if __name__ == "__main__":
    serve(main)
