"""Probe of ephemeral ports from other nodes, because a firewall may open only a part of the range.

The mesh connects to one port of each node, and collectives to others that the kernel chooses, so a partly
open range fails some runs and not others.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checklist.measurements import OpenPorts, to_dict
from checklist.probing.context import Context

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of this network namespace, and of IPv6 too
TRIED = 16  # ports per range, so a blocked sixteenth of it is detected
_NEXT = 32  # number of next ports to try if one is in use
_AT_ONCE = 32
_BACKLOG = 64


def open_some(context: Context, address: str, other_address: str | None) -> dict[str, Any]:
    """Listen on ports sampled from this host's ephemeral range; on one port of ``other_address``, if any."""
    close(context)
    low, high = (int(number) for number in RANGE.read_text().split())
    step = (high - low + 1) / TRIED
    requested = [low + int((index + 0.5) * step) for index in range(TRIED)]
    listeners = context.stored["open"] = []
    ports = [port for first in requested if (port := _listen(listeners, address, first)) is not None]
    other_sockets = (
        [] if other_address is None else [_listen(listeners, other_address, requested[TRIED // 2])]
    )
    return {
        "low": low,
        "high": high,
        "ports": ports,
        "others": [port for port in other_sockets if port is not None],
    }


def close(context: Context) -> None:
    """Close all listeners."""
    for listener in context.stored.pop("open", ()):
        listener.close()


def knock(context: Context, targets: Sequence[dict[str, Any]], connect_s: float) -> list[dict[str, Any]]:
    """Connect to each port of the nodes; retry failures once, because a packet may be lost."""
    records = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for target in targets:
            ports = [int(port) for port in target["tried"]]
            for _ in range(2):
                context.progress.begin()
                results = pool.map(lambda port, to=target["address"]: _opens(to, port, connect_s), ports)
                ports = [port for port, is_open in zip(ports, results, strict=True) if not is_open]
                if not ports:
                    break
            records.append(to_dict(OpenPorts(src=context.node, blocked=tuple(ports), **target)))
    return records


def _listen(listeners: list[socket.socket], address: str, first: int) -> int | None:
    """Listen on the first free port from ``first``; None without a free port nearby or the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(first, first + _NEXT):
        with contextlib.suppress(OSError):  # in use
            listeners.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            return port
    return None


def _opens(address: str, port: int, connect_s: float) -> bool:
    try:
        socket.create_connection((address, port), timeout=connect_s).close()
    except OSError:
        return False
    return True
