"""State and rate of the InfiniBand, RoCE and EFA ports of this host."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from checklist.measurements import RdmaPort

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
        model=_read(device / "board_id") or _read(device / "hca_type"),
        state=_state_name(_read(port / "state")),
        physical=_state_name(_read(port / "phys_state")),
        gbps=_rate(_read(port / "rate")),
        layer=_read(port / "link_layer"),
    )


def _state_name(text: str | None) -> str | None:
    """Parse the name of a state such as "4: ACTIVE"."""
    return None if text is None else text.partition(":")[2].strip() or text


def _rate(text: str | None) -> float | None:
    with contextlib.suppress(ValueError, IndexError):
        rate = float((text or "").split()[0])
        return rate if 0 < rate < math.inf else None
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):  # missing or unreadable with some drivers
        return None
