"""What the ranks' environment tells PyTorch's CUDA allocator: expandable segments, beside what the user says.

PYTORCH_CUDA_ALLOC_CONF is read by all releases from 2.6 to 2.13. Those since 2.9 read PYTORCH_ALLOC_CONF too,
2.13 where the former is not there (c10/cuda/CUDAAllocatorConfig.h); with 2.9.1 it alone does not switch on
expandable segments (pytorch/pytorch, issue 183387).
"""

from __future__ import annotations

from collections.abc import Mapping

from estimator import hardware
from launchers.gang.job import TrainJob

NAME = "PYTORCH_CUDA_ALLOC_CONF"
GENERAL_NAME = "PYTORCH_ALLOC_CONF"
_OPTION = "expandable_segments"
_OTHER_ALLOCATOR = "cudaMallocAsync"  # CUDA's own, which knows no segments


def allocator_environment(job: TrainJob, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set in the ranks' environment; none where nothing is to change.

    Expandable segments are CUDA's: CPUs have no such allocator, and with ROCm they hang (pytorch/pytorch,
    issue 192259). What ``environ`` says of them, or of another allocator, stands.
    """
    if not (job.settings.expandable_segments and _on_nvidia(job)):
        return {}
    given = {name: environ[name].strip() for name in (NAME, GENERAL_NAME) if environ.get(name, "").strip()}
    if any(_OPTION in value or _OTHER_ALLOCATOR in value for value in given.values()):
        return {}
    # The first hides the second from releases that read both, so it takes over what the second says.
    given.setdefault(NAME, given.get(GENERAL_NAME, ""))
    return {name: ",".join(filter(None, [value, f"{_OPTION}:True"])) for name, value in given.items()}


def _on_nvidia(job: TrainJob) -> bool:
    """Whether the ranks have NVIDIA's GPUs; a GPU that the table lacks was found by NVIDIA's library."""
    name = job.plan.request.gpu_type
    gpu = hardware.find_gpu_by_nvml_name(name) if name else None
    return job.plan.layout.device == "cuda" and (gpu is None or gpu.vendor == "nvidia")
