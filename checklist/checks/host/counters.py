"""Counters of this host: TCP retransmissions, port errors, links that went down, CPU throttling.

Counters grow since the host (or the pod's network) came up; a phase's share is the difference of two
readings.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from checklist.checks.host import cgroup
from checklist.probing.context import Context
from checklist.probing.kernel_files import read_number

_SNMP = Path("/proc/self/net/snmp")  # of this process's network namespace
_RDMA = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")
# Documentation/ABI/stable/sysfs-class-infiniband of the kernel; hw_counters of mlx5 and of efa's driver.
# Omitted: counters that also grow on healthy hosts, such as efa's retrans_pkts and rnr_nak_retry_err. The
# oldest counters saturate (symbol_error at 65,535, link_downed at 255) and are useless from then on.
_ERRORS = (
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/port_rcv_remote_physical_errors",
    "counters/port_xmit_discards",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/implied_nak_seq_err",
    "hw_counters/roce_adp_retrans",
    "hw_counters/roce_adp_retrans_to",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rx_icrc_encapsulated",
    "hw_counters/rx_drops",
    "hw_counters/retrans_timeout_events",
    "hw_counters/unresponsive_remote_events",
)


# Ethernet counters of ethtool -S: Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst
# of the kernel. Omitted: counters that also grow on healthy hosts, such as discards for lack of buffers.
_PORT = ("link_down_events_phy", "rx_crc_errors_phy", "rx_symbol_err_phy")
_CRC = "statistics/rx_crc_errors"  # Documentation/ABI/testing/sysfs-class-net-statistics, of any driver
_ETHTOOL_S = 5.0
OF_CPU = ("cpu_periods", "cpu_throttled")


def read(_: Context, nic: str | None) -> dict[str, Any]:
    """Read TCP segments and retransmissions, and errors of RDMA ports and ``nic``; None if unavailable."""
    segments, retransmitted = tcp(_SNMP)
    port = None if nic is None else _NETWORK / nic
    cpu = cgroup.throttling()
    return {
        "tcp_segments": segments,
        "tcp_retransmitted": retransmitted,
        "rdma_errors": rdma(_RDMA),
        "carrier_changes": None if port is None else read_number(port / "carrier_changes"),
        "port_errors": None if port is None else ethernet(port, _ethtool(port.name)),
        "cpu_periods": None if cpu is None else cpu.periods,
        "cpu_throttled": None if cpu is None else cpu.throttled,
    }


def ethernet(port: Path, ethtool_output: str) -> dict[str, int]:
    """Return error counters of an interface from /sys/class/net and from the output of ``ethtool -S``."""
    crc = read_number(port / _CRC)
    counters = {} if crc is None else {"rx_crc_errors": crc}
    for line in ethtool_output.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _PORT and value.strip().isdigit():
            counters[name.strip()] = int(value)
    return counters


def _ethtool(nic: str) -> str:
    """Return the output of ethtool -S; empty without ethtool or driver counters."""
    try:
        done = subprocess.run(
            ["ethtool", "-S", nic], capture_output=True, text=True, timeout=_ETHTOOL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # not installed, or the driver does not respond
        return ""
    return done.stdout


def tcp(snmp: Path) -> tuple[int | None, int | None]:
    """Read OutSegs (without retransmissions) and RetransSegs of RFC 4022."""
    try:
        lines = [line.split()[1:] for line in snmp.read_text().splitlines() if line.startswith("Tcp:")]
        values = dict(zip(lines[0], map(int, lines[1]), strict=True))
        return values["OutSegs"], values["RetransSegs"]
    except (OSError, IndexError, KeyError, ValueError):  # no such file, or of another form
        return None, None


def rdma(devices: Path) -> dict[str, int] | None:
    """Read all error counters of RDMA ports as "device/port/counter"; None without ports."""
    ports = sorted(devices.glob("*/ports/*"))
    counters: dict[str, int] = {}
    for port in ports:
        device = port.parent.parent.name
        # EFA's counters are in the device's folder in some kernels, in the port's folder in others
        for folder, where in ((port, f"{device}/{port.name}"), (port.parent.parent, device)):
            for error in _ERRORS:
                value = read_number(folder / error)
                if value is not None:
                    counters[f"{where}/{error.rpartition('/')[2]}"] = value
    return counters if ports else None


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the growth between two readings; None if either is missing."""

    def more(name: str) -> int | None:
        first, final = before[name], after[name]
        return None if first is None or final is None else max(0, final - first)

    def errors(name: str) -> dict[str, int] | None:
        first, final = before[name], after[name]
        if first is None or final is None:
            return None
        return {key: increase for key in final if (increase := final[key] - first.get(key, final[key])) > 0}

    return {
        **{name: more(name) for name in ("tcp_segments", "tcp_retransmitted", "carrier_changes", *OF_CPU)},
        **{name: errors(name) for name in ("rdma_errors", "port_errors")},
    }
