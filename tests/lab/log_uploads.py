"""Less frequent uploads and polls of logs than by Metaflow, for pods and clients.

A sidecar starts a Python that uploads a task's log whenever that has grown, every second or two at first.
Each takes a second or two of a core, of which all pods here share a few. The process that submits a task
asks for the task's state and for both its logs four times a second.
"""

from __future__ import annotations

from pathlib import Path

PAUSE_S = 15.0  # between two uploads, at least
FOLLOW_S = 1.0  # between two looks at a task
_UPLOADS = """
import sys

if sys.orig_argv[-1:] == ["save_logs_periodically"]:
    import time

    sleep = time.sleep
    time.sleep = lambda seconds: sleep(max(seconds, {pause}))
"""
# metaflow.mflog's delay grows from 0.25 s; no other sleep of these processes is as long.
_FOLLOWING = """
import sys

if "step" in sys.orig_argv and {{"kubernetes", "batch"}} & set(sys.orig_argv):
    import time

    sleep = time.sleep
    time.sleep = lambda seconds: sleep({follow} if 0.25 < seconds < 0.5 else seconds)
"""


def install(folder: Path) -> None:
    """Make Pythons with the site-packages ``folder`` upload their logs less often."""
    (folder / "log_uploads_of_tests.py").write_text(_UPLOADS.format(pause=PAUSE_S))
    (folder / "log_uploads.pth").write_text("import log_uploads_of_tests\n")


def install_for_clients(folder: Path) -> Path:
    """Make Pythons that have ``folder`` in PYTHONPATH follow their tasks less often; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_FOLLOWING.format(follow=FOLLOW_S))
    return folder
