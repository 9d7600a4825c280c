"""Pods that send their logs less often than Metaflow's do.

A sidecar starts a Python that uploads a task's log whenever that has grown, every second or two at first.
Each takes a second or two of a core, of which all pods here share a few.
"""

from __future__ import annotations

from pathlib import Path

PAUSE_S = 15.0  # between two uploads, at least
_MODULE = """
import sys

if sys.orig_argv[-1:] == ["save_logs_periodically"]:
    import time

    sleep = time.sleep
    time.sleep = lambda seconds: sleep(max(seconds, {pause}))
"""


def install(folder: Path) -> None:
    """For Pythons with the site-packages ``folder``."""
    (folder / "log_uploads_of_tests.py").write_text(_MODULE.format(pause=PAUSE_S))
    (folder / "log_uploads.pth").write_text("import log_uploads_of_tests\n")
