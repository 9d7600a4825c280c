"""Physical host of a virtual machine, as far as the hypervisor reveals it. None on bare metal."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checklist.probing.kernel_files import read_bytes

_HYPERV_POOL = "var/lib/hyperv/.kvp_pool_3"  # values of the host, written by hv_kvp_daemon
_KEY_BYTES, _VALUE_BYTES = 512, 2048  # linux/hyperv.h, HV_KVP_EXCHANGE_MAX_{KEY,VALUE}_SIZE
_HOST_NAME = "PhysicalHostName"
_LEAST_SERIAL = 6  # letters; shorter serial numbers are placeholders such as "None"


def physical_host(root: Path = Path("/")) -> str | None:
    """Return an identifier that virtual machines of one host share; None if not readable, or on bare metal.

    Sources: Hyper-V's key-value pairs, and the board's serial number (hashed) where a hypervisor passes on
    that of its host.
    """
    return (_hyperv(root) or _board(root)) if _virtual(root) else None


def _virtual(root: Path) -> bool:
    """Return whether a hypervisor runs below the kernel (a flag of the processor)."""
    for line in read_bytes(root / "proc/cpuinfo").decode(errors="replace").splitlines():
        if line.startswith("flags"):
            return "hypervisor" in line.split()
    return False


def _hyperv(root: Path) -> str | None:
    data = read_bytes(root / _HYPERV_POOL)
    record_bytes = _KEY_BYTES + _VALUE_BYTES
    for start in range(0, len(data) - record_bytes + 1, record_bytes):
        key, value = data[start : start + _KEY_BYTES], data[start + _KEY_BYTES : start + record_bytes]
        if key.rstrip(b"\0").decode(errors="replace") == _HOST_NAME:
            return value.split(b"\0")[0].decode(errors="replace") or None
    return None


def _board(root: Path) -> str | None:
    serial = read_bytes(root / "sys/class/dmi/id/board_serial").decode(errors="replace").strip()
    if len(serial) < _LEAST_SERIAL or not any(letter.isdigit() for letter in serial):
        return None  # "Not Specified", "Default string", or not readable
    return f"board {hashlib.sha256(serial.encode()).hexdigest()[:12]}"
