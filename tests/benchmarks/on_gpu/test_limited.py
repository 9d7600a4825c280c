"""Memory limits of a process: enforced for host memory, and passed to torch for GPU memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.on_gpu import limited

FILL = """
import torch
from benchmarks.on_gpu.limited import _limit_host
for gib in (4, 0.4):
    _limit_host(int(gib * 2**30))
    held = [torch.ones(64 * 2**20, dtype=torch.uint8) for _ in range(8)]  # 512 MiB
    del held
    print("held below", gib)
"""


@pytest.mark.slow
def test_a_process_that_exceeds_the_memory_limit_fails_as_out_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True, check=False)
    assert done.stdout == "held below 4\n"
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr


@pytest.mark.parametrize(("limit", "fraction"), [(36 * 2**30, 0.25), (200 * 2**30, 1.0)])
def test_a_memory_limit_is_set_in_torch_as_a_fraction_of_the_ranks_gpu(
    limit: int, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    device = SimpleNamespace(total_memory=144 * 2**30)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(("device", index)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: device}.__getitem__)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda value, index: calls.append(("fraction", (value, index))),
    )
    limited._limit_gpu(limit, 3)
    assert calls == [("device", 3), ("fraction", (fraction, 3))]
