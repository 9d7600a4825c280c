"""CPU and memory limits of a container, in cgroup v1 and v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checklist.checks.host import cgroup
from tests.checklist.checks.host.files import host

MEMORY = {"proc__meminfo": "MemTotal: 65536 kB\nMemFree: 1 kB\n"}
STAT = "usage_usec 5\nnr_periods 200\nnr_throttled 140\nthrottled_usec 9\n"


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc__self__cgroup": "0::/",
            "sys__fs__cgroup__cpu.max": "60000 100000",
            "sys__fs__cgroup__cpu.stat": STAT,
            "sys__fs__cgroup__memory.max": "33554432",
        },
        {
            "proc__self__cgroup": "0::/pods/one",
            "sys__fs__cgroup__pods__cpu.max": "60000 100000",
            "sys__fs__cgroup__pods__cpu.stat": STAT,
            "sys__fs__cgroup__pods__one__cpu.max": "max 100000",
            "sys__fs__cgroup__pods__one__memory.max": "max",
            "sys__fs__cgroup__pods__memory.max": "33554432",
        },
        {
            "proc__self__cgroup": "5:memory:/a\n2:cpu,cpuacct:/a\n0::/",
            "sys__fs__cgroup__cpu,cpuacct__a__cpu.cfs_quota_us": "60000",
            "sys__fs__cgroup__cpu,cpuacct__a__cpu.cfs_period_us": "100000",
            "sys__fs__cgroup__cpu,cpuacct__a__cpu.stat": STAT,
            "sys__fs__cgroup__memory__a__memory.limit_in_bytes": "33554432",
        },
    ],
    ids=["version 2", "version 2, of the parent", "version 1"],
)
def test_the_lowest_limit_of_all_cgroups_counts(tmp_path: Path, files: dict[str, str]) -> None:
    root = host(tmp_path, **MEMORY, **files)
    assert cgroup.limits(root) == cgroup.Limits(cpus=0.6, memory_bytes=32 << 20)
    assert cgroup.throttling(root) == cgroup.Throttling(periods=200, throttled=140)


def test_without_a_cgroup_limit_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        **MEMORY,
        proc__self__cgroup="4:memory:/\n1:cpu:/",
        **{
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert cgroup.limits(root) == cgroup.Limits(cpus=len(os.sched_getaffinity(0)), memory_bytes=64 << 20)
    assert cgroup.throttling(root) is None


def test_the_cpu_load_is_the_one_minute_average_per_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 100.0, 100.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert cgroup.load_per_cpu() == 0.75
