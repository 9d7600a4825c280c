"""What the kernel counts of this host's network: TCP segments sent again, errors of RDMA ports.

Figures grow from when the host (or the pod's network) came up; what a phase has added is the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checklist.probes.context import Context

_SNMP = Path("/proc/self/net/snmp")  # of this process's network namespace
_RDMA = Path("/sys/class/infiniband")
# Documentation/ABI/stable/sysfs-class-infiniband of the kernel; hw_counters of mlx5 and of efa's driver.
# Left out: counters that also grow in health, as efa's retrans_pkts and rnr_nak_retry_err do.
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
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rx_icrc_encapsulated",
    "hw_counters/rx_drops",
    "hw_counters/retrans_timeout_events",
    "hw_counters/unresponsive_remote_events",
)


def read(_: Context) -> dict[str, Any]:
    """TCP segments sent and sent again, and the RDMA ports' errors; None: not to be had here."""
    sent, again = tcp(_SNMP)
    return {"tcp_segments": sent, "tcp_retransmitted": again, "rdma_errors": rdma(_RDMA)}


def tcp(snmp: Path) -> tuple[int | None, int | None]:
    """OutSegs (without those sent again) and RetransSegs of RFC 4022."""
    try:
        lines = [line.split()[1:] for line in snmp.read_text().splitlines() if line.startswith("Tcp:")]
        values = dict(zip(lines[0], map(int, lines[1]), strict=True))
        return values["OutSegs"], values["RetransSegs"]
    except (OSError, IndexError, KeyError, ValueError):  # no such file, or of another form
        return None, None


def rdma(devices: Path) -> dict[str, int] | None:
    """Every error counter that a port has, as "device/port/counter"; None: there is no port."""
    ports = sorted(devices.glob("*/ports/*"))
    grown: dict[str, int] = {}
    for port in ports:
        device = port.parent.parent.name
        # EFA's counters belong to the device in some kernels, and to its port in others
        for place, where in ((port, f"{device}/{port.name}"), (device_of(port), device)):
            for error in _ERRORS:
                value = _number(place / error)
                if value is not None:
                    grown[f"{where}/{error.rpartition('/')[2]}"] = value
    return grown if ports else None


def device_of(port: Path) -> Path:
    """The folder of the device that a port belongs to."""
    return port.parent.parent


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was added from one reading to the next; None where either has none."""

    def more(name: str) -> int | None:
        first, last = before[name], after[name]
        return None if first is None or last is None else max(0, last - first)

    first, last = before["rdma_errors"], after["rdma_errors"]
    errors = None
    if first is not None and last is not None:
        errors = {name: grown for name in last if (grown := last[name] - first.get(name, last[name])) > 0}
    return {
        "tcp_segments": more("tcp_segments"),
        "tcp_retransmitted": more("tcp_retransmitted"),
        "rdma_errors": errors,
    }


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not every device has every counter
        return None
