"""Whether a scoring function has a number for a sample, before a run has asked for anything.

``python -m launchers.scoring.check request.json`` calls it, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from estimator.errors import UserError
from launchers.request_process import PROBLEM, serve
from launchers.scoring.functions import load_function, score_by

SAMPLE = ("What is Python's `abc` module for?", "Abstract base classes.")  # a prompt and an answer
CHECK_S = 120.0  # that a function may take for the sample, its imports included


def check_function(function: str) -> None:
    """Raise UserError where a function is not there, or has no finite number for a sample.

    It is called in a process of its own, which prints nothing here.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "check.json"
        request.write_text(json.dumps({"function": function}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
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
                "Score with a faster function.",
            ) from None
        problem = request.with_name(PROBLEM)
        if problem.is_file():
            raise UserError(**json.loads(problem.read_text()))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"Scoring function {function} has ended its process: {last}")


def main(path: Path) -> None:
    """Try the function that the request names, in this process."""
    function = json.loads(path.read_text())["function"]
    score_by(load_function(function, function), function, *SAMPLE)


if __name__ == "__main__":
    serve(main)
