"""CPUs of a rank: those close to its GPU, unless they are too few."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pynvml
import pytest

from launchers.cluster import numa
from tests.checklist.checks.gpu.nvml import Gpu, Nvml

Bind = Callable[..., set[int] | None]
TWO_SOCKETS = [0x0000FFFF] * 4 + [0xFFFF0000] * 4  # 8 GPUs, 32 CPUs


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Bind:
    """``bind(masks, rank, threads)``: the CPUs that a rank is bound to; None if it is not bound."""

    def bound(masks: Sequence[int], rank: int, *, threads: int, allowed: int = 32) -> set[int] | None:
        gpus = [
            Gpu(nvmlDeviceGetUUID=f"GPU-{index}", nvmlDeviceGetCpuAffinity=lambda _, mask=mask: [mask])
            for index, mask in enumerate(masks)
        ]
        nvml, chosen = Nvml(*gpus), []
        for name in dir(Nvml):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, getattr(nvml, name))
        for name in ("nvmlDeviceGetUUID", "nvmlDeviceGetCpuAffinity"):
            monkeypatch.setattr(pynvml, name, getattr(nvml, name))
        monkeypatch.setattr(os, "cpu_count", lambda: 32)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: chosen.append(cpus))
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        numa.bind_to_gpu(rank, len(masks))
        return chosen[0] if chosen else None

    return bound


def test_a_rank_is_bound_to_the_cpus_of_its_gpus_socket(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bind(TWO_SOCKETS, 1, threads=4) == set(range(16))
    assert bind(TWO_SOCKETS, 5, threads=4) == set(range(16, 32))
    assert bind(TWO_SOCKETS, 5, threads=4, allowed=28) is None, "12 CPUs for 16 threads"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-6,GPU-1")
    assert bind(TWO_SOCKETS, 0, threads=4) == set(range(16, 32))


def test_a_rank_is_not_bound_if_binding_has_no_benefit_or_would_take_cpus_away(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bind([0xFFFFFFFF] * 8, 0, threads=4) is None, "one NUMA node"
    assert bind([0x0000FFFF] * 8, 0, threads=4) is None, "all GPUs on one of two sockets"
    assert bind([], 0, threads=4) is None, "no GPU"
    assert bind([0], 0, threads=4) is None, "unknown"


def test_without_a_driver_the_cpus_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert numa.gpu_cpus() == []
