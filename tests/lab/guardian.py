"""Cleanup of a test bed after the test process has ended for any reason.

Reads lines from standard input:

    namespace net:[4026532] /proc/PID/fd/N   a network namespace, and where it can be opened
    released net:[4026532]                   nothing is in there any more
    cgroup /sys/fs/cgroup/...

At its end every process in those namespaces is killed, then the control groups are removed. A process of its
own, because a test that is killed can clean nothing up. It holds the namespaces open: the number of one that
is gone is soon another's.
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
    """Return the processes in one of these network namespaces."""
    processes_inside = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str((entry / "ns" / "net").readlink()) in namespaces:
                    processes_inside.append(int(entry.name))
    return processes_inside


def name_of(descriptor: int) -> str:
    """Return the name of a namespace in the format of ``readlink /proc/PID/ns/net``."""
    return f"net:[{os.fstat(descriptor).st_ino}]"


def read_orders() -> tuple[set[str], list[Path]]:
    """Return namespaces and control groups left when the test process has ended."""
    held: dict[str, int] = {}
    cgroups = []
    for line in sys.stdin:
        kind, value, *target = line.split()
        if kind == "cgroup":
            cgroups.append(Path(value))
        elif kind == "released" and value in held:
            os.close(held.pop(value))
        elif kind == "namespace":
            with contextlib.suppress(OSError):  # it has gone meanwhile
                descriptor = os.open(target[0], os.O_RDONLY)
                if name_of(descriptor) == value:
                    held[value] = descriptor
                else:
                    os.close(descriptor)
    return set(held), cgroups


def main() -> None:
    namespaces, cgroups = read_orders()
    deadline = time.monotonic() + LIMIT_S
    while (leftover := inside(namespaces)) and time.monotonic() < deadline:
        for pid in leftover:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for cgroup in cgroups:
        with contextlib.suppress(OSError):
            cgroup.rmdir()


if __name__ == "__main__":
    main()
