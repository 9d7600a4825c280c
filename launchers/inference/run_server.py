"""Run an inference server in this process, which ends when its parent process ends.

``python -m launchers.inference.run_server request.json``
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from launchers.cluster.processes import PARENT, die_with_parent


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(int(os.environ[PARENT]), signal.SIGTERM)
    os.chdir(request["folder"])
    os.execv(request["command"][0], request["command"])  # noqa: S606


if __name__ == "__main__":
    main()
