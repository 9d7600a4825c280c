"""This machine: GPUs, driver, torch build, NCCL."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from checklist.checks.gpu import gpus_probe as nvml
from flows.doctor.line import Line

NO_GPU = (
    "Install NVIDIA's driver until nvidia-smi lists the GPU; start containers with `--gpus all`; "
    "request nvidia.com/gpu for pods"
)
CUDA_BUILD = "Install a CUDA build of torch: pip install --force-reinstall torch"


def gpus() -> list[Line]:
    """Check the GPUs that this process may use, and their driver."""
    gpu_state = nvml.list_gpus()
    if not gpu_state.names:
        if gpu_state.driver is not None:
            found = f"driver {gpu_state.driver}, but no GPU is visible to this process"
            return [Line(check="GPU", state="no", found=found, fix="Check CUDA_VISIBLE_DEVICES")]
        found = "the driver reports no NVIDIA GPU: small models train on CPUs, larger ones can be planned"
        return [Line(check="GPU", state="no", found=found, fix=NO_GPU)]
    counts = {name: gpu_state.names.count(name) for name in gpu_state.names}
    found = ", ".join(f"{count} x {name}" for name, count in counts.items())
    busy = sum(uuid in (gpu_state.busy or {}) for uuid in gpu_state.uuids)
    lines = [
        Line(check="GPU", state="ok", found=found),
        Line(check="driver", state="ok", found=str(gpu_state.driver)),
    ]
    if busy:
        found += f"; {busy} in use by other processes"
        lines[0] = Line(check="GPU", state="unknown", found=found, fix="Run nvidia-smi to see which")
    return lines


def torch() -> list[Line]:
    """Check torch's build, its GPUs, and NCCL on one GPU."""
    if find_spec("torch") is None:
        return []  # reported with the packages
    import torch as framework

    gpu_state, build = nvml.list_gpus(), framework.version.cuda
    found = f"{framework.__version__}, built for {f'CUDA {build}' if build else 'CPUs'}"
    if not gpu_state.names:
        nccl = Line(
            check="NCCL", state="unknown", found="not tested: no GPU (CPUs communicate over gloo)", fix=NO_GPU
        )
        return [Line(check="torch build", state="ok", found=found), nccl]
    if build is None:
        fix = CUDA_BUILD
        found += ": it cannot use the GPUs"
    elif not framework.cuda.is_available():
        fix = "Install a newer driver, or torch for an older CUDA; `nvidia-smi` shows the driver's"
        found += f": it cannot use the GPUs with driver {gpu_state.driver}"
    else:
        return [Line(check="torch build", state="ok", found=found), _nccl(framework)]
    nccl = Line(check="NCCL", state="unknown", found="not tested: torch finds no GPU", fix=fix)
    return [Line(check="torch build", state="no", found=found, fix=fix), nccl]


def _nccl(framework: Any) -> Line:
    """Check NCCL with an all-reduce in this process only; the checklist tests all GPUs."""
    dist: Any = import_module("torch.distributed")

    if not dist.is_nccl_available():
        return Line(check="NCCL", state="no", found="this build of torch does not include it", fix=CUDA_BUILD)
    try:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        value = framework.ones(1, device="cuda")
        dist.all_reduce(value)
        framework.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        message = str(error).strip().splitlines()[-1]
        fix = "Show details with NCCL_DEBUG=INFO; test all GPUs with python -m checklist"
        return Line(check="NCCL", state="no", found=message, fix=fix)
    version = ".".join(map(str, framework.cuda.nccl.version()))
    return Line(check="NCCL", state="ok", found=f"{version}, on one GPU; python -m checklist tests all")
