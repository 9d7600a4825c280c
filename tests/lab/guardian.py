"""Ends what a test bed has started when the test process is gone, however it went.

Reads lines from standard input, ``namespace net:[4026532]`` and ``cgroup /sys/fs/cgroup/...``. At its end
every process in those network namespaces is killed, then the cgroups are removed. A process of its own,
because a test that is killed can clean nothing up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 20.0


def inside(namespaces: set[str]) -> list[int]:
    """Processes in one of these network namespaces; nobody can hide in another's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str((entry / "ns" / "net").readlink()) in namespaces:
                    found.append(int(entry.name))
    return found


def main() -> None:
    namespaces, cgroups = set(), []
    for line in sys.stdin:
        kind, _, value = line.rstrip("\n").partition(" ")
        if kind == "namespace":
            namespaces.add(value)
        else:
            cgroups.append(Path(value))
    deadline = time.monotonic() + LIMIT_S
    while (left := inside(namespaces)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for cgroup in cgroups:
        with contextlib.suppress(OSError):
            cgroup.rmdir()


if __name__ == "__main__":
    main()
