"""XID events reported by the NVIDIA driver for a GPU, from the kernel's log or else from NVML.

The log has all events, including those before the run, but is often unreadable in a container. NVML delivers
only critical events to active listeners. Without either source the result is unknown, which is not "none".
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checklist.probing.context import Context

# "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)(?:\.\d)?\): (\d+)")
_KMSG = re.compile(
    r"^\d+,\d+,(\d+),[^;]*;(.*)$"
)  # Documentation/ABI/testing/dev-kmsg: microseconds since boot
_DMESG = re.compile(r"^(?:<\d+>)?\[ *(\d+\.\d+)\] (.*)$")
_RECORD_BYTES = 8192  # maximum size of a kernel log record
_DMESG_S = 5.0
_WAIT_MS = 500


@dataclass(frozen=True, slots=True)
class Event:
    """One XID, with the kernel's seconds since boot."""

    seconds: float
    gpu: tuple[int, int, int]
    """PCI domain, bus and device."""
    code: int


@dataclass(frozen=True, slots=True)
class Log:
    """XIDs in the kernel's log, and the time of its newest record."""

    events: tuple[Event, ...]
    until: float
    """Seconds since boot of the newest record."""


def parse(text: str) -> Log:
    """Parse a log in the format of /dev/kmsg or dmesg, skipping other lines."""
    events, until = [], 0.0
    for line in text.splitlines():
        if record := _KMSG.match(line):
            seconds = int(record[1]) / 1e6
        elif record := _DMESG.match(line):
            seconds = float(record[1])
        else:
            continue
        until = max(until, seconds)
        if xid := _XID.search(record[2]):
            events.append(Event(seconds, pci(xid[1]), int(xid[2])))
    return Log(tuple(events), until)


def pci(address: str) -> tuple[int, int, int]:
    """Parse domain, bus and device of "0000:3b:00" or NVML's "00000000:3B:00.0"."""
    domain, bus, device = address.partition(".")[0].split(":")
    return int(domain, 16), int(bus, 16), int(device, 16)


def kernel_log(device: str = "/dev/kmsg") -> Log | None:
    """Read the kernel's log; None if it is unreadable, or empty as in some sandboxes."""
    log = parse(_kmsg(device) or _dmesg())
    return log if log.until else None


def _kmsg(device: str) -> str:
    records = []
    try:
        file = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # missing in most containers, or requires CAP_SYSLOG
        return ""
    try:
        while True:
            try:
                record = os.read(file, _RECORD_BYTES)
            except BrokenPipeError:  # overwritten before it was read; continue with the next record
                continue
            except OSError:  # EAGAIN: no more
                break
            if not record:
                break
            records.append(record.decode(errors="replace"))
    finally:
        os.close(file)
    return "".join(records)


def _dmesg() -> str:
    program = shutil.which("dmesg")
    if program is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([program], capture_output=True, text=True, timeout=_DMESG_S, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""


class Watch:
    """Listener for a GPU's critical XIDs through NVML, in a thread that runs until the process ends."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Start listening. Raises NVMLError (or AttributeError) if the GPU or driver has no events."""
        nvml.nvmlInit()  # reference-counted: keeps NVML open after the caller's shutdown
        self.codes: list[int] = []
        self.lost = False
        self._nvml, self._events = nvml, nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        threading.Thread(target=self._listen, name="checklist-xid", daemon=True).start()

    def _listen(self) -> None:
        nvml = self._nvml
        while not self.lost:
            try:
                self.codes.append(int(nvml.nvmlEventSetWait_v2(self._events, _WAIT_MS).eventData))
            except nvml.NVMLError_Timeout:  # noqa: PERF203 - nothing happened in that time
                continue
            except nvml.NVMLError:  # GPU or driver lost; later events are unknown
                self.lost = True


def read_xids(context: Context, when: str, address: str | None, nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the fields xids, xids_earlier and xid_source of GpuHealth for the GPU at a PCI address."""
    log = kernel_log() if address is not None else None
    if log is not None and address is not None:
        return _from_log(context, when, log, pci(address))
    if when == "before":
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            context.stored["xids"] = Watch(nvml, handle)
    watch = context.stored.get("xids")  # missing in a restarted process
    if watch is None or watch.lost:
        return {"xids": None, "xids_earlier": None, "xid_source": None}
    return {"xids": tuple(watch.codes), "xids_earlier": None, "xid_source": "NVML events"}


def _from_log(context: Context, when: str, log: Log, gpu: tuple[int, int, int]) -> dict[str, Any]:
    """Split XIDs at the log's end as of "before"; newer ones belong to the run."""
    mark = Path(context.directory) / f"rank{context.rank}.kernel-log"  # survives a restart of this process
    if when == "before":
        mark.write_text(repr(log.until))
    since = float(mark.read_text()) if mark.exists() else None
    events = [event for event in log.events if event.gpu == gpu]
    return {
        "xids": None if since is None else tuple(event.code for event in events if event.seconds > since),
        "xids_earlier": tuple(event.code for event in events if since is None or event.seconds <= since),
        "xid_source": "kernel log",
    }
