"""Host settings that affect training, read from /proc and /sys without root.

Names are the kernel's, so they are easy to look up: ``net.core.rmem_max``, ``kernel parameter iommu``.
Unreadable settings (a container shows only some) are omitted, which does not mean that they are off.
Host-specific values, such as the boot disk, are omitted too.
"""

from __future__ import annotations

import array
import fcntl
import platform
import resource
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from checklist.measurements import COMMAND_LINE, CPU, PARAMETER, Nic
from checklist.probing.kernel_files import read_bytes

MODULES = ("nvidia_peermem", "gdrdrv")  # GPU Direct RDMA; read if the GPU's driver is loaded
# Parameters of Documentation/admin-guide/kernel-parameters.txt that affect speed; others may be host-specific
_PARAMETERS = (
    *("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict"),
    *("hugepages", "hugepagesz", "default_hugepagesz", "transparent_hugepage", "numa_balancing", "numa"),
    *("isolcpus", "nohz", "nohz_full", "rcu_nocbs", "nosmt", "mitigations", "idle", "nmi_watchdog"),
    *("intel_idle.max_cstate", "processor.max_cstate", "intel_pstate", "amd_pstate", "cpuidle.off"),
    *("cpufreq.default_governor", "tsc", "clocksource", "pci", "pcie_aspm", "preempt", "skew_tick"),
)
# Documentation/admin-guide/sysctl/{net,vm,kernel}.rst, Documentation/networking/ip-sysctl.rst. Omitted:
# values that the kernel derives from the memory size, such as net.ipv4.tcp_mem
_SYSCTLS = (
    *("net.core.rmem_max", "net.core.wmem_max", "net.core.rmem_default", "net.core.wmem_default"),
    *("net.core.somaxconn", "net.core.netdev_max_backlog", "net.core.default_qdisc"),
    *("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.ipv4.tcp_congestion_control", "net.ipv4.tcp_sack"),
    *("net.ipv4.tcp_timestamps", "net.ipv4.tcp_window_scaling", "net.ipv4.tcp_mtu_probing"),
    *("net.ipv4.tcp_slow_start_after_idle", "net.ipv4.ip_local_port_range"),
    *("net.ipv4.conf.all.rp_filter", "net.ipv4.conf.all.arp_ignore", "net.ipv4.conf.all.arp_announce"),
    *("kernel.numa_balancing", "vm.zone_reclaim_mode", "vm.swappiness", "vm.overcommit_memory"),
    *("vm.max_map_count",),
)
_LIMITS = {"ulimit memlock": resource.RLIMIT_MEMLOCK, "ulimit nofile": resource.RLIMIT_NOFILE}
_SIOCETHTOOL, _GDRVINFO = 0x8946, 0x3  # linux/sockios.h, linux/ethtool.h
_DRVINFO_BYTES, _TEXT_BYTES = 196, 32
_ACS, _ACS_CONTROL = 0x000D, 6  # extended capability and offset, linux/pci_regs.h
_ACS_REDIRECTS = 0x0004 | 0x0008  # P2P request and completion redirect
_EXTENDED = 0x100  # offset of the extended capabilities, whose contents only root may read


def read(nics: tuple[Nic, ...], nic: str | None, root: Path = Path("/")) -> dict[str, str]:
    """Read the host's settings by name; ``nic`` is the interface in use."""
    settings: dict[str, str | None] = {
        CPU: _cpu(root),
        "kernel release": platform.release(),
        **_command_line(root),
        **{name: _text(root / "proc/sys" / name.replace(".", "/")) for name in _SYSCTLS},
        **_processors(root),
        **_memory(root),
        **{name: _limit(resource_id) for name, resource_id in _LIMITS.items()},
        **_pci(root),
        **_modules(root),
        **_interfaces(root, nics),
        "MTU of the interface in use": next(
            (str(nic_state.mtu) for nic_state in nics if nic_state.name == nic and nic_state.mtu), None
        ),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _cpu(root: Path) -> str | None:
    lines = read_bytes(root / "proc/cpuinfo").decode(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _command_line(root: Path) -> dict[str, str]:
    """Read the kernel parameters that affect speed; a repeated parameter keeps both values."""
    text = _text(root / "proc/cmdline")
    if text is None:
        return {}
    options: dict[str, list[str]] = {}
    for argument in text.partition(" -- ")[0].split():  # what follows is passed to init
        name, equals, value = argument.partition("=")
        if name in _PARAMETERS:
            options.setdefault(name, []).append(value if equals else "set")
    return {COMMAND_LINE: "read"} | {
        f"{PARAMETER}{name}": " ".join(values) for name, values in options.items()
    }


def _processors(root: Path) -> dict[str, str | None]:
    cpus = root / "sys/devices/system/cpu"
    return {
        "CPU frequency driver": _distinct(cpus.glob("cpu[0-9]*/cpufreq/scaling_driver")),
        "CPU governor": _distinct(cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")),
        "CPU energy preference": _distinct(cpus.glob("cpu[0-9]*/cpufreq/energy_performance_preference")),
        "SMT": _text(cpus / "smt/control"),
        "clock source": _text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
    }


def _memory(root: Path) -> dict[str, str | None]:
    pages = root / "sys/kernel/mm"
    settings = {
        f"transparent huge pages, {name}": _selected(_text(pages / "transparent_hugepage" / name))
        for name in ("enabled", "defrag")
    }
    for size in sorted(pages.glob("hugepages/hugepages-*")):
        settings[f"huge pages of {size.name.removeprefix('hugepages-')}"] = _text(size / "nr_hugepages")
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    return {**settings, "NUMA nodes": str(nodes) if nodes else None}


def _pci(root: Path) -> dict[str, str | None]:
    """Read whether an IOMMU translates DMA, and how many devices ACS redirects via the root complex."""
    groups = root / "sys/kernel/iommu_groups"
    domains = _distinct(groups.glob("*/type"))
    if domains is None and groups.is_dir():
        domains = "off" if not any(groups.iterdir()) else None
    configs = [
        config for file in (root / "sys/bus/pci/devices").glob("*/config") if (config := read_bytes(file))
    ]
    readable = [config for config in configs if len(config) > _EXTENDED]
    redirecting = sum(bool(_acs(config) & _ACS_REDIRECTS) for config in readable)
    return {
        "IOMMU domains": domains,
        "PCI devices that ACS redirects": str(redirecting) if readable else None,  # unknown without root
    }


def _acs(config: bytes) -> int:
    """Return the ACS control register from a device's configuration space; 0 if it has none."""
    offset, visited = _EXTENDED, set[int]()
    while offset and offset not in visited and offset + 8 <= len(config):
        visited.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", config, offset + _ACS_CONTROL)[0])
        offset = header >> 20
    return 0


def _modules(root: Path) -> dict[str, str]:
    modules = root / "sys/module"
    if not (modules / "nvidia").is_dir():
        return {}
    return {f"module {name}": "loaded" if (modules / name).is_dir() else "not loaded" for name in MODULES}


def _interfaces(root: Path, nics: tuple[Nic, ...]) -> dict[str, str]:
    """Read settings of all physical interfaces, by driver, because interface names differ between hosts."""
    versions: dict[str, set[str]] = {}
    for nic in nics:
        if not (root / "sys/class/net" / nic.name / "device").exists():
            continue
        driver, version, firmware = _driver(nic.name)
        if driver is None:
            continue
        if version and version != platform.release():  # in-tree drivers report the kernel's release
            versions.setdefault(f"driver {driver}", set()).add(version)
        if firmware:
            versions.setdefault(f"firmware of {driver}", set()).add(firmware)
        if nic.mtu:
            versions.setdefault(f"MTU of {driver}", set()).add(str(nic.mtu))
    for device in (root / "sys/class/infiniband").glob("*"):
        kind = _text(device / "board_id") or device.name.partition("_")[0]
        if rdma_firmware := _text(device / "fw_ver"):
            versions.setdefault(f"RDMA firmware of {kind}", set()).add(rdma_firmware)
    return {name: ", ".join(sorted(values)) for name, values in sorted(versions.items())}


def _driver(nic: str) -> tuple[str | None, str, str]:
    """Return driver, driver version and firmware of an interface, like ``ethtool -i``."""
    reply = array.array("B", struct.pack("I", _GDRVINFO).ljust(_DRVINFO_BYTES, b"\0"))
    address, _ = reply.buffer_info()
    request = struct.pack("16sP", nic.encode()[:15], address).ljust(40, b"\0")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    except OSError:  # not supported by the driver
        return None, "", ""
    texts = [reply.tobytes()[4 + index * _TEXT_BYTES :][:_TEXT_BYTES] for index in range(3)]
    driver, version, firmware = (text.split(b"\0")[0].decode(errors="replace").strip() for text in texts)
    return driver or None, version, firmware if firmware != "N/A" else ""


def _limit(resource_id: int) -> str:
    soft, _ = resource.getrlimit(resource_id)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _selected(text: str | None) -> str | None:
    """Return the option in brackets, as in "always [madvise] never"."""
    selected = (text or "").partition("[")[2].partition("]")[0]
    return selected or None


def _distinct(files: Iterable[Path]) -> str | None:
    """Join the distinct values of the files; None if there are none."""
    values = {value for file in files if (value := _text(file))}
    return ", ".join(sorted(values)) if values else None


def _text(file: Path) -> str | None:
    try:
        return " ".join(file.read_text(errors="replace").split())
    except OSError:  # missing or not permitted
        return None
