"""CPU affinity of ranks: each runs on the CPUs of its GPU's NUMA node."""

from __future__ import annotations

import logging
import os
from typing import Any

from estimator.hardware.visible_gpus import visible_handles

_log = logging.getLogger(__name__)
_WORD_BITS = 64  # NVML's masks are arrays of 64-bit words


def bind_to_gpu(local_rank: int, processes: int) -> None:
    """Restrict this rank, and threads that it starts later, to the CPUs near its GPU.

    Does nothing without a GPU, or if the CPUs there are too few for the threads (OMP_NUM_THREADS) of the
    ranks whose GPUs share them. CPUs that this process may not use stay excluded. ``processes``: ranks on
    this machine.
    """
    allowed = os.sched_getaffinity(0)
    near = [cpus & allowed for cpus in gpu_cpus()]
    if local_rank >= len(near):
        return
    own_cpus = near[local_rank]
    sharing = sum(cpus == own_cpus for cpus in near[:processes])
    if len(own_cpus) >= sharing * int(os.environ.get("OMP_NUM_THREADS") or 1) and own_cpus != allowed:
        os.sched_setaffinity(0, own_cpus)
        _log.info("Rank %d runs on %d CPUs next to its GPU", local_rank, len(own_cpus))


def gpu_cpus() -> list[set[int]]:
    """Return the CPUs next to each visible GPU, in CUDA's order; empty without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return [_cpus(handle) for handle in visible_handles(pynvml)]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        _log.debug("CPUs next to GPUs are unknown: %s", error)
        return []


def _cpus(handle: Any) -> set[int]:
    import pynvml

    masks = pynvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // _WORD_BITS))
    bits = [mask >> bit & 1 for mask in masks for bit in range(_WORD_BITS)]
    return {cpu for cpu, is_near in enumerate(bits) if is_near}
