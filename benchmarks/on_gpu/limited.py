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
LIMIT = "ON_GPU_LIMIT_BYTES"  # limit of each process; no limit if unset


class Limited:
    """The job's engine (see launchers.engines.Engine) with the memory limit given in the environment."""

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
    """Limit the bytes that PyTorch's caching allocator reserves, with or without expandable segments.

    At the limit, as on a full GPU, the allocator frees cached blocks and retries before it fails
    (c10/cuda/CUDACachingAllocator.cpp, alloc_block). CUDA's context and NCCL's buffers are not limited.
    """
    import torch

    torch.cuda.set_device(index)
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), index)


def _limit_host(limit_bytes: int) -> None:
    """Limit the process's private writable memory (VmData of proc(5)); Linux 4.7 and later.

    When training on a CPU, nearly all of it is resident: tensors, and freed memory that torch keeps.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
