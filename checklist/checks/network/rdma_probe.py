"""State and rate of the InfiniBand, RoCE and EFA ports of this host."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from checklist.measurements import RdmaPort
from checklist.probing.kernel_files import read_text

_DEVICES = Path("/sys/class/infiniband")


def ports(devices: Path = _DEVICES) -> tuple[RdmaPort, ...]:
    """List all ports of all devices (kernel's Documentation/ABI/stable/sysfs-class-infiniband).

    ``state`` is "4: ACTIVE", ``phys_state`` "5: LinkUp", ``rate`` "400 Gb/sec (4X NDR)".
    """
    return tuple(_port(port) for port in sorted(devices.glob("*/ports/*")))


def _port(port: Path) -> RdmaPort:
    device = port.parent.parent
    return RdmaPort(
        name=f"{device.name}/{port.name}",
        # Prefer the board to the chip, because cards of different rates share a chip
        model=read_text(device / "board_id") or read_text(device / "hca_type"),
        state=_state_name(read_text(port / "state")),
        physical=_state_name(read_text(port / "phys_state")),
        gbps=_rate(read_text(port / "rate")),
        layer=read_text(port / "link_layer"),
    )


def _state_name(text: str | None) -> str | None:
    """Parse the name of a state such as "4: ACTIVE"."""
    return None if text is None else text.partition(":")[2].strip() or text


def _rate(text: str | None) -> float | None:
    with contextlib.suppress(ValueError, IndexError):
        rate = float((text or "").split()[0])
        return rate if 0 < rate < math.inf else None
    return None
