"""Tracing process: Setups as JSON on standard input, estimates as JSON on standard output."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings

from estimator.errors import UserError
from estimator.exact.process import setup_from


def main() -> int:
    # The result is the last line of standard output, as libraries may print; warnings are not for users
    """Trace the setups on standard input; the last line of the output has the estimates or the error."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        from estimator.exact.trace import trace

        estimates = [trace(setup_from(values)) for values in json.load(sys.stdin)]
        response: dict[str, object] = {"estimates": estimates}
    except UserError as error:
        response = {"problem": error.problem, "advice": error.advice}
    print("\n" + json.dumps(response))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # fake process groups and patched libraries need no cleanup
