"""Memory of a process, as reported with each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launchers.report.telemetry import memory_now

KINDS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
# The form of torch's allocator statistics: peaks are 1, 5, ... in the order of KINDS
STATISTICS = {
    kind: {
        pool: {"current": 1, "peak": 1 + 4 * number, "allocated": 9, "freed": 8}
        for pool in ("all", "large_pool", "small_pool")
    }
    for number, kind in enumerate(KINDS)
}


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate the allocator of a GPU; the list has one entry for each query."""
    made: list[str] = []

    def statistics(device: Any = None) -> dict[str, Any]:
        made.append("query")
        return STATISTICS

    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "memory_stats_as_nested_dict", statistics)
    return made


def test_memory_peaks_are_those_of_torch_and_take_one_query(queries: list[str]) -> None:
    memory = memory_now(0, 1)
    assert len(queries) == 1
    assert memory.allocated_peak == torch.cuda.max_memory_allocated() == 1
    assert memory.reserved_peak == torch.cuda.max_memory_reserved() == 5


def test_memory_peaks_are_unknown_before_a_gpu_is_used() -> None:
    memory = memory_now(0, 1)
    assert (memory.allocated_peak, memory.reserved_peak) == (None, None)
    assert min(memory.rss, memory.rss_peak) > 0
