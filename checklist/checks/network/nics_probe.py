"""Network interfaces of a host, and the one that NCCL or gloo will use."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checklist.measurements import Nic

_NETWORK = Path("/sys/class/net")
_VIRTUAL = ("docker", "veth", "br-", "virbr", "cni")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Interface used by the backend."""

    nic: str | None
    """Name, even if the host has no such interface."""
    reason: str
    address: str | None
    """Address at which others reach this host; if the interface is unusable, that of the route to rank 0."""
    usable: bool
    """Whether the backend can reach other hosts over it."""


def interfaces() -> tuple[Nic, ...]:
    """List all interfaces with their addresses, including loopback."""
    import psutil

    states = psutil.net_if_stats()
    return tuple(
        Nic(
            name=name,
            addresses=tuple(
                item.address.partition("%")[0]
                for item in items
                if item.family in (socket.AF_INET, socket.AF_INET6)
            ),
            mtu=states[name].mtu if name in states else None,
            gbps=rate(_NETWORK / name),
            up=states[name].isup if name in states else None,
        )
        for name, items in sorted(psutil.net_if_addrs().items())
    )


def choose(
    backend: str, nics: tuple[Nic, ...], route_to: str, environment: Mapping[str, str] = os.environ
) -> Choice:
    """Return the interface of NCCL (``NCCL_SOCKET_IFNAME``, else its order) or gloo (hostname)."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    route = _route(route_to)
    setting = environment.get(variable)
    if setting:
        matching = [nic for nic in nics if _matches(nic.name, setting, backend)]
        if not matching:
            available = ", ".join(nic.name for nic in nics)
            verb = "leaves" if setting.startswith("^") else "names"
            reason = f"{variable}={setting} {verb} no interface of this host, which has {available}"
            return Choice(nic=setting.removeprefix("="), reason=reason, address=route, usable=False)
        # NCCL skips interfaces without an address, many of which remain after an exclusion
        first = next((nic for nic in matching if nic.addresses and nic.up is not False), matching[0])
        return _choice(first, f"{variable}={setting}", route, route_to)
    if backend == "gloo":
        return _of_hostname(nics, route, route_to)
    usable = [nic for nic in nics if nic.addresses and nic.up]
    order = sorted(usable, key=lambda nic: (_rank(nic.name), nic.name))
    if not order:
        return Choice(nic=None, reason="no interface has an address", address=route, usable=False)
    return _choice(order[0], f"NCCL's order: ib*, then others, then {_VIRTUAL[0]}*, then lo", route, route_to)


def own_address() -> str | None:
    """Resolve this host's name; None if that fails."""
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, proto=socket.IPPROTO_TCP)
    except OSError:
        return None
    return str(addresses[0][4][0])


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.") or address == "localhost"


def _of_hostname(nics: tuple[Nic, ...], route: str | None, route_to: str) -> Choice:
    name, address = socket.gethostname(), own_address()
    if address is None:
        reason = f"the host name {name} cannot be resolved, so gloo uses loopback"
        return Choice(nic=_loopback(nics), reason=reason, address=route, usable=False)
    nic = next((nic for nic in nics if address in nic.addresses), None)
    if nic is None and is_loopback(address):
        nic = next((nic for nic in nics if nic.name == _loopback(nics)), None)
    if nic is None:
        reason = f"the host's own name {name} is {address}, which no interface of it has"
        return Choice(nic=None, reason=reason, address=route, usable=False)
    return _choice(nic, f"the host's own name {name} is {address}", route, route_to)


def _choice(nic: Nic, reason: str, route: str | None, route_to: str) -> Choice:
    address = next((item for item in nic.addresses if ":" not in item), next(iter(nic.addresses), None))
    if address is None:
        return Choice(nic=nic.name, reason=f"{reason}; it has no address", address=route, usable=False)
    if route is not None and route in nic.addresses:
        address = route
    # Loopback is valid only if rank 0 is reached over loopback too, i.e. all ranks are on one machine.
    if is_loopback(address) and not is_loopback(route_to):
        return Choice(nic=nic.name, reason=f"{reason}; loopback", address=route, usable=False)
    return Choice(nic=nic.name, reason=reason, address=address, usable=True)


def _matches(name: str, setting: str, backend: str) -> bool:
    """Whether an interface matches the variable's value.

    NCCL: prefixes; ``=`` for exact names, ``^`` to exclude. gloo: exact names.
    """
    exclude, exact = setting.startswith("^"), backend == "gloo"
    text = setting.lstrip("^")
    if text.startswith("="):
        text, exact = text[1:], True
    matched = any(name == part if exact else name.startswith(part) for part in text.split(",") if part)
    return matched != exclude


def _rank(name: str) -> int:
    if name.startswith("ib"):
        return 0
    if name == "lo":
        return 3
    return 2 if name.startswith(_VIRTUAL) else 1


def _loopback(nics: tuple[Nic, ...]) -> str | None:
    return next((nic.name for nic in nics if any(is_loopback(item) for item in nic.addresses)), None)


def _route(target: str) -> str | None:
    """Return this host's address on the route to ``target`` without sending anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def rate(interface: Path) -> float | None:
    """Read the line rate in Gbit/s of an interface in /sys/class/net; None without a link.

    A veth (used by pods) always reports 10 Gbit/s; a VLAN or a bond reports the rate of its lower devices.
    """
    lower = (device for device in interface.glob("lower_*") if (device / "device").exists())
    if not (interface / "device").exists() and next(lower, None) is None:
        return None
    try:
        megabits = int((interface / "speed").read_text())
    except (OSError, ValueError):  # not reported in some virtual machines
        return None
    return megabits / 1000 if megabits > 0 else None
