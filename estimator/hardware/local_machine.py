"""Hardware of this machine for the planner. Only this module inspects the machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from estimator.hardware.visible_gpus import visible_handles
from estimator.job import Machine


def detect(folder: Path | str = ".") -> Machine:
    """Return GPUs (from NVML), CPU cores, memory, and the free disk space of the file system of ``folder``.

    Cores and memory are limited to those of this process: CPU affinity and control group. Without driver,
    library or GPU, there are no GPUs.
    """
    import psutil  # not needed to plan for a cluster

    return Machine(
        gpus=_gpus(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_bytes=min(int(psutil.virtual_memory().total), _memory_limit() or 2**63),
        disk_free_bytes=shutil.disk_usage(_existing(Path(folder))).free,
    )


def has_gpus() -> bool:
    """Return whether this machine has a GPU that the driver reports and CUDA_VISIBLE_DEVICES allows."""
    return bool(_gpus())


def _gpus() -> tuple[tuple[str, int], ...]:
    """Return (name, memory) of the GPUs that CUDA_VISIBLE_DEVICES allows, in its order."""
    if sys.platform == "linux" and not _has_driver_library():  # importing pynvml takes 25 ms
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(
            (pynvml.nvmlDeviceGetName(handle), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in visible_handles(pynvml)
        )
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _has_driver_library() -> bool:
    """Return whether NVML, which is part of NVIDIA's driver, is installed under the name pynvml loads."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _memory_limit() -> int | None:
    """Return the memory limit of the control group (v2, then v1), or None."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = Path(name)
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():  # v2 has "max" without a limit
            return int(text)
    return None


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
