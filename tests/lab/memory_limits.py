"""Memory limits of pods, enforced by control groups if available.

``mechanism()`` says which of these a machine has. ``"cgroup v1"`` and ``"cgroup v2"``: the kernel refuses
what is too much, as under a container runtime. ``"watched"``: nothing is refused, but the pod is killed soon
after its processes' memory (resident set sizes, shared pages counted once for each) was seen above the
limit; a short peak can pass unseen.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from pathlib import Path
from typing import Literal

import psutil

from tests.lab import guardian

_ENDING_S = 10.0
Mechanism = Literal["cgroup v1", "cgroup v2", "watched"]


def _mounts() -> list[tuple[str, str, str]]:
    lines = Path("/proc/mounts").read_text().splitlines()
    return [(columns[1], columns[2], columns[3]) for columns in map(str.split, lines)]


def _own_path(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller:
            return path.strip("/")
    return ""


def _make(parent: Path) -> Path | None:
    """Create a control group below ``parent`` that can limit memory; None if impossible."""
    group = parent / f"lab-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError:
        return None
    if any((group / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        return group
    group.rmdir()
    return None


@functools.lru_cache(maxsize=1)
def _parent() -> tuple[Mechanism, Path | None]:
    for mount, kind, options in _mounts():
        if kind == "cgroup" and "memory" in options.split(","):
            version, controller = "cgroup v1", "memory"
        elif kind == "cgroup2":
            version, controller = "cgroup v2", ""
        else:
            continue
        for parent in (Path(mount) / _own_path(controller), Path(mount)):
            if (probe := _make(parent)) is not None:
                probe.rmdir()
                return ("cgroup v1" if version == "cgroup v1" else "cgroup v2"), parent
    return "watched", None


def mechanism() -> Mechanism:
    """Return how limits are enforced on this machine."""
    return _parent()[0]


class MemoryLimit:
    """The limit of one pod. ``join``: shell commands with which its first process enters it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        kind, parent = _parent()
        self.cgroup = _make(parent) if parent is not None else None
        self._seen_above = False
        if self.cgroup is not None and kind == "cgroup v1":
            (self.cgroup / "memory.limit_in_bytes").write_text(str(limit_bytes))
        elif self.cgroup is not None:
            (self.cgroup / "memory.max").write_text(str(limit_bytes))
            (self.cgroup / "memory.swap.max").write_text("0")

    @property
    def join(self) -> str:
        return f"echo $$ > {self.cgroup}/cgroup.procs" if self.cgroup is not None else ":"

    def exceeded(self, namespace: str) -> bool:
        """Return whether a process of the pod was killed for memory, or (watched) the pod must be killed.

        ``namespace``: the pod's network namespace as ``/proc/PID/ns/net`` names it.
        """
        if self.cgroup is None:
            self._seen_above = self._seen_above or _resident_bytes(namespace) > self.limit_bytes
            return self._seen_above
        for name in ("memory.oom_control", "memory.events"):
            path = self.cgroup / name
            if path.exists():
                counts = dict(line.split() for line in path.read_text().splitlines())
                return int(counts.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Remove the limit of an ended pod, whose last processes may still be exiting."""
        deadline = time.monotonic() + _ENDING_S
        while not self._removed() and time.monotonic() < deadline:  # later on the guardian tries once more
            time.sleep(0.05)

    def _removed(self) -> bool:
        try:
            if self.cgroup is not None:
                self.cgroup.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _resident_bytes(namespace: str) -> int:
    total = 0
    for pid in guardian.inside({namespace}):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total
