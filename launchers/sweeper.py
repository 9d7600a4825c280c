"""Waits for a node's task to end, then ends all that is left of its gang.

The kernel ends agent and ranks when the task is killed; what a rank has started itself (workers of its
data loader, compilers) has lost its parent by then and is found by the gang's marker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from launchers.cluster.processes import marked_pids


def main() -> None:
    marker, task_pid = sys.argv[1], int(sys.argv[2])
    for how in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(how, signal.SIG_IGN)
    while os.getppid() == task_pid:
        time.sleep(0.5)
    # Two passes that find nothing: a process could be starting another one during the first.
    clean = 0
    deadline = time.monotonic() + 60
    while clean < 2 and time.monotonic() < deadline:
        pids = marked_pids(marker)
        clean = 0 if pids else clean + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
