"""The memory of the largest process, and the counter that measured it."""

from __future__ import annotations

import pytest

from launchers.report.peak import MemoryPeak, largest_process

GIB = 2**30


@pytest.mark.parametrize(
    ("reserved", "resident", "device", "expected"),
    [
        ([3, 2], [9, 9], 5, MemoryPeak(size_bytes=5, counter="device")),
        ([3, 2], [9, 9], 3, MemoryPeak(size_bytes=3, counter="device")),
        ([3, 2], [9, 9], 0, MemoryPeak(size_bytes=3, counter="reserved")),
        ([132 * GIB], [9], GIB // 2, MemoryPeak(size_bytes=132 * GIB, counter="reserved")),
        ([None, None], [4, 7], 0, MemoryPeak(size_bytes=7, counter="resident")),
        ([None], [4], 5, MemoryPeak(size_bytes=4, counter="resident")),  # a GPU that the run doesn't use
        ([], [], 5, None),
    ],
)
def test_device_memory_counts_only_if_it_is_at_least_the_memory_reserved_by_torch(
    reserved: list[int | None], resident: list[int | None], device: int, expected: MemoryPeak | None
) -> None:
    assert largest_process(reserved, resident, device) == expected
