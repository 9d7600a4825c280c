"""What the kernel's control groups say of this process's memory."""

from __future__ import annotations

from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def oom_kills(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int | None:
    """How many processes of this one's group the kernel's out-of-memory killer has ended; None: unknown.

    Kernel documentation: ``oom_kill`` of ``memory.events`` (cgroup v2) and of ``memory.oom_control`` (v1).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found = _counter(mount / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found = _counter(mount / "memory" / path.lstrip("/") / "memory.oom_control")
        else:
            continue
        if found is not None:
            return found
    return None


def _counter(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = dict(line.partition(" ")[::2] for line in lines)
    return int(values["oom_kill"]) if values.get("oom_kill", "").isdigit() else None
