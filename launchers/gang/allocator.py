"""Environment of the ranks for PyTorch's CUDA allocator: expandable segments, added to the user's options.

PYTORCH_CUDA_ALLOC_CONF is read by all releases from 2.6 to 2.13. Releases since 2.9 also read
PYTORCH_ALLOC_CONF, 2.13 only if the former is not set (c10/cuda/CUDAAllocatorConfig.h); with 2.9.1 it alone
does not enable expandable segments (pytorch/pytorch, issue 183387).
"""

from __future__ import annotations

from collections.abc import Mapping

from estimator import hardware
from launchers.gang.script_job import GangJob

NAME = "PYTORCH_CUDA_ALLOC_CONF"
GENERAL_NAME = "PYTORCH_ALLOC_CONF"
_OPTION = "expandable_segments"
_OTHER_ALLOCATOR = "cudaMallocAsync"  # CUDA's allocator, which has no segments


def allocator_environment(job: GangJob, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables to set in the ranks' environment; empty if nothing changes.

    Expandable segments need CUDA: CPUs have no such allocator, and ROCm hangs with them (pytorch/pytorch,
    issue 192259). A choice about them, or another allocator, in ``environ`` is respected.
    """
    if not (job.expandable_segments and _on_nvidia(job)):
        return {}
    user = {name: environ[name].strip() for name in (NAME, GENERAL_NAME) if environ.get(name, "").strip()}
    if any(_OPTION in value or _OTHER_ALLOCATOR in value for value in user.values()):
        return {}
    # Releases that read both ignore the second if the first is set, so the first gets the second's options
    user.setdefault(NAME, user.get(GENERAL_NAME, ""))
    return {name: ",".join(filter(None, [value, f"{_OPTION}:True"])) for name, value in user.items()}


def _on_nvidia(job: GangJob) -> bool:
    """Whether the ranks have NVIDIA GPUs; a GPU missing from the table was detected by NVIDIA's library."""
    name = job.gpu_type
    gpu = hardware.find_gpu_by_nvml_name(name) if name else None
    return job.layout.device == "cuda" and (gpu is None or gpu.vendor == "nvidia")
