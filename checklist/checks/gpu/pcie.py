"""PCIe links that several GPUs of a host share: its GPUs take turns in measuring copies."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from checklist.checks.gpu.nvml import optional, session
from checklist.probing.context import Context
from estimator.hardware.visible_gpus import visible_handles

TURN_S = 30.0  # a turn takes about a second; eight GPUs may share a link
_POLL_S = 0.02


@contextlib.contextmanager
def turn(context: Context) -> Iterator[None]:
    """Serialize the block among GPUs below one root port; wait at most ``TURN_S`` for the others."""
    port = root_port(_address(context))
    with contextlib.ExitStack() as stack:
        if port is not None:
            stack.enter_context(exclusive(f"checklist {port}", TURN_S))
        yield


@contextlib.contextmanager
def exclusive(name: str, limit_s: float) -> Iterator[bool]:
    """Hold a mutex of the host's network namespace; yield whether it was free within ``limit_s``.

    The mutex is an abstract Unix socket, which the kernel releases when the process ends.
    """
    deadline = time.monotonic() + limit_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mutex:
        while not (free := _bind(mutex, name)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield free


def _bind(mutex: socket.socket, name: str) -> bool:
    try:
        mutex.bind(f"\0{name}")
    except OSError:  # held by another process
        return False
    return True


def root_port(address: str | None, root: Path = Path("/")) -> str | None:
    """Return the PCI address of the root port above a device; None if unknown.

    ``address``: of the device, in the kernel's form "0000:18:00.0".
    """
    device = root / "sys/bus/pci/devices" / (address or "none")
    parts = device.resolve().parts if device.exists() else ()
    # .../sys/devices/pci0000:15/0000:15:01.0/.../0000:18:00.0: the first one below the host bridge
    bridges = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[bridges[-1] + 1] if bridges and bridges[-1] + 1 < len(parts) else None


def _address(context: Context) -> str | None:
    """Return the PCI address of this rank's GPU in the kernel's form; NVML's has a domain of eight digits."""
    with session() as nvml:
        handles = visible_handles(nvml) if nvml is not None else []
        if context.local_rank >= len(handles):
            return None
        info = optional(partial(nvml.nvmlDeviceGetPciInfo, handles[context.local_rank]), nvml)
        return None if info is None else info.busId.lower()[-12:]
