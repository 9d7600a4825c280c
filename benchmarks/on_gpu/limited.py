"""Engine that limits the memory of a run, for ``launchers.run.worker --engine``.

The only part that touches CUDA: everything else is the launchers', or reads what their ranks report.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from launchers import engines
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv

if TYPE_CHECKING:
    from launchers.settings import Settings

ENGINE = "benchmarks.on_gpu.limited:Limited"
LIMIT = "ON_GPU_LIMIT_BYTES"  # of each process; not set: none


class Limited:
    """The job's own engine (see launchers.engines.Engine) below the limit in the environment."""

    def unsupported_settings(self, settings: Settings) -> str | None:
        return engines.get(settings.engine).unsupported_settings(settings)

    def train(self, job: TrainJob) -> None:
        limit = os.environ.get(LIMIT)
        if limit and job.plan.layout.device == "cuda":
            _limit_gpu(int(limit), RankEnv.read().local_rank)
        elif limit:
            _limit_host(int(limit))
        engines.get(job.plan.engine).train(job)

    def collect(self, job: TrainJob, destination: Path) -> None:
        engines.get(job.plan.engine).collect(job, destination)


def _limit_gpu(limit_bytes: int, index: int) -> None:
    """Hold what PyTorch's caching allocator reserves below the limit, with expandable segments as without.

    Before it refuses, the allocator gives cached blocks back and tries again, as on a GPU that is full
    (c10/cuda/CUDACachingAllocator.cpp, alloc_block). CUDA's context and NCCL's buffers are not its own.
    """
    import torch

    torch.cuda.set_device(index)
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), index)


def _limit_host(limit_bytes: int) -> None:
    """Hold the process's private writable memory (VmData of proc(5)) below the limit; Linux 4.7 and later.

    Of a process that trains on a CPU nearly all of that is resident: torch's tensors, and what they leave.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
