"""CPU and memory that the cgroups of this process allow, and how often its CPU quota held it up.

Reads version 2 and version 1 (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/ and
scheduler/sched-bwc.rst of the kernel). A limit of any group above counts, so the lowest is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checklist.probing.kernel_files import read_number, read_text

_UNLIMITED_BYTES = 1 << 60  # version 1 shows "no limit" as the largest multiple of a page


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of this process. None: unknown."""

    cpus: float | None
    """CPUs by quota and affinity."""
    memory_bytes: int | None
    """The cgroup's limit, or the machine's memory if that is less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throttling:
    """Periods of the CPU quota (mostly 100 ms), and those in which it was used up."""

    periods: int
    throttled: int


def limits(root: Path = Path("/")) -> Limits:
    """Read the CPUs and the memory that this process may use."""
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    sizes = [size for group in _groups(root, "memory") if (size := _memory(group)) is not None]
    total = _machine_bytes(root)
    return Limits(
        cpus=min([float(len(os.sched_getaffinity(0))), *quotas]),
        memory_bytes=min([*sizes, *([] if total is None else [total])], default=None),
    )


def throttling(root: Path = Path("/")) -> Throttling | None:
    """Read the counters of the group that was held up most; None without a quota."""
    readings = [reading for group in _groups(root, "cpu") if (reading := _throttling(group)) is not None]
    return max(readings, key=lambda one: one.throttled, default=None)


def load_per_cpu() -> float:
    """Return the runnable processes per CPU of the host, averaged over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's group of a controller and the groups above it, as far as they are visible."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, path_text = line.partition(":")
        controllers, _, path = path_text.partition(":")
        if controllers == "":
            tops = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
        elif controller in controllers.split(","):
            tops = (root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller)
        else:
            continue
        for top in tops:
            folder = top / path.strip("/")
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent
            yield top


def _quota(group: Path) -> float | None:
    """Return the CPUs of a group's quota; None without one."""
    values = (read_text(group / "cpu.max") or "").split()
    if len(values) == 2:
        return int(values[0]) / int(values[1]) if values[0] != "max" else None
    quota, period = read_number(group / "cpu.cfs_quota_us"), read_number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _memory(group: Path) -> int | None:
    size = read_number(group / "memory.max")  # "max" is no number
    if size is None:
        size = read_number(group / "memory.limit_in_bytes")
    return size if size is not None and 0 < size < _UNLIMITED_BYTES else None


def _throttling(group: Path) -> Throttling | None:
    if _quota(group) is None:
        return None
    stat = dict(
        line.split()[:2] for line in (read_text(group / "cpu.stat") or "").splitlines() if " " in line
    )
    try:
        return Throttling(periods=int(stat["nr_periods"]), throttled=int(stat["nr_throttled"]))
    except (KeyError, ValueError):
        return None


def _machine_bytes(root: Path) -> int | None:
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return None
