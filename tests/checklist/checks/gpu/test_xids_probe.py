"""XID events from the kernel log and NVML: GPU, time, and required action."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checklist.checks.gpu import xids_judge as catalogue
from checklist.checks.gpu import xids_probe
from checklist.checks.gpu.xids_probe import Event

ROOT = Path(__file__).resolve().parents[4]
KMSG = """\
6,141,9345113,-;nvidia 0000:3b:00.0: enabling device (0140 -> 0142)
 SUBSYSTEM=pci
 DEVICE=+pci:0000:3b:00.0
4,27,86400000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus
4,208,86400000100,-;NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
4,209,86500000000,-;NVRM: Xid (PCI:0000:5e:00): 13, pid=8721, name=python3, Graphics SM Warp Exception
4,210,86600000000,c;NVRM: Xid (PCI:0008:06:00): 149, NETIR_LINK_DOWN Fatal   XC0 i0 Link 07 (0x004505c6)
"""
DMESG = """\
[    0.000000] Linux version 6.8.0
[86400.000000] NVRM: Xid (PCI:0000:3b:00): 48, pid=1234, name=python3, An uncorrectable double bit error (DBE)
<4>[86401.500000] NVRM: Xid (0000:3b:00): 63, pid=1896, Row Remapper: New row marked for remapping
kern: a line of another form
"""


def test_kernel_records_are_read_with_their_gpu_code_and_time() -> None:
    log = xids_probe.parse(KMSG)
    assert log.events == (
        Event(86400.0, (0, 0x3B, 0), 79),
        Event(86500.0, (0, 0x5E, 0), 13),
        Event(86600.0, (8, 0x06, 0), 149),
    )
    assert log.until == 86600.0


def test_dmesg_lines_are_read_with_both_formats_of_the_pci_address() -> None:
    assert xids_probe.parse(DMESG).events == (
        Event(86400.0, (0, 0x3B, 0), 48),
        Event(86401.5, (0, 0x3B, 0), 63),
    )


def test_pci_addresses_of_nvml_and_the_kernel_are_normalized_to_the_same_form() -> None:
    assert xids_probe.pci("00000000:3B:00.0") == xids_probe.pci("0000:3b:00")


def test_an_unreadable_kernel_log_is_unknown_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no dmesg
    assert xids_probe.kernel_log(str(tmp_path / "none")) is None
    (tmp_path / "empty").write_text("")
    assert xids_probe.kernel_log(str(tmp_path / "empty")) is None
    (tmp_path / "kmsg").write_text(KMSG)
    assert xids_probe.kernel_log(str(tmp_path / "kmsg")) == xids_probe.parse(KMSG)


class Rank:
    """The attributes of a worker that the probe uses."""

    def __init__(self, directory: Path) -> None:
        self.rank, self.directory, self.stored = 0, directory, {}  # type: ignore[var-annotated]


def test_xids_are_divided_into_those_during_the_run_and_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_xids(worker: Rank, when: str, text: str) -> dict[str, Any]:
        monkeypatch.setattr(xids_probe, "kernel_log", lambda: xids_probe.parse(text))
        return xids_probe.read_xids(worker, when, "00000000:3B:00.0", None, None)  # type: ignore[arg-type]

    before = read_xids(Rank(tmp_path), "before", KMSG)
    assert before == {"xids": (), "xids_earlier": (79,), "xid_source": "kernel log"}
    later = (
        KMSG + "4,2300,90000000000,-;NVRM: Xid (PCI:0000:3b:00): 119, pid=1, Timeout after 45s of waiting\n"
    )
    restarted = Rank(tmp_path)  # the process was killed and restarted in between
    assert read_xids(restarted, "after", later) == {
        "xids": (119,),
        "xids_earlier": (79,),
        "xid_source": "kernel log",
    }


# A driver's library with one GPU, which reports XID 79 half a second after somebody has begun to listen
STAND_IN = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int r) { return "stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)0x1; return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { snprintf(s, n, "GPU-1"); return 0; }
int nvmlDeviceGetPciInfo_v3(void *h, char *info) {
    memset(info, 0, 68); strcpy(info + 36, "00000000:3B:00.0"); return 0;
}
int nvmlEventSetCreate(void **s) { *s = (void *)0x2; return 0; }
int nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *s) {
    return types == 8 && s == (void *)0x2 ? SUPPORTED : 2;
}
int nvmlEventSetWait_v2(void *s, event_t *e, unsigned ms) {
    static int told = 0;
    usleep(ms * 1000);
    if (told++) return 10;
    e->type = 8; e->data = 79; return 0;
}
"""
ASK = """
import json, sys, time
from pathlib import Path
from checklist.checks.gpu import gpus_probe, xids_probe
xids_probe.kernel_log = lambda: None
class Worker: rank, local_rank, directory, stored = 0, 0, Path(sys.argv[1]), {}
first = gpus_probe.health(Worker, "before")
deadline = time.monotonic() + 20
while "xids" in Worker.stored and not Worker.stored["xids"].codes and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps([first, gpus_probe.health(Worker, "after")]))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a stand-in of NVIDIA's library")
@pytest.mark.parametrize("supported", [True, False])
def test_without_the_kernel_log_xids_come_from_nvml_events_or_are_unknown(
    tmp_path: Path, supported: bool
) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(STAND_IN.replace("SUPPORTED", "0" if supported else "3"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (before,), (after,) = json.loads(done.stdout)
    if supported:
        assert (before["xids"], before["xid_source"]) == ([], "NVML events")
        assert after["xids"] == [79]
    else:
        assert before["xids"] is after["xids"] is None


def test_each_row_of_the_xid_catalog_has_an_action_that_agrees_with_its_source() -> None:
    for row in catalogue.table().values():
        assert row.name
        assert row.source.startswith("https://docs.nvidia.com/"), row
        assert row.action == "RESET" or row.catalogue != "RESET_GPU", row
        assert (row.action == "REBOOT") == (row.catalogue in ("RESTART_BM", "RESTART_VM")), row


def test_xids_of_hardware_are_distinguished_from_those_of_applications() -> None:
    actions = {code: catalogue.action(code) for code in (13, 31, 48, 79, 95, 119, 54)}
    assert actions == {
        13: "MONITOR",
        31: "MONITOR",
        48: "RESET",
        79: "REBOOT",
        95: "RESET",
        119: "RESET",
        54: "ISOLATE",
    }
