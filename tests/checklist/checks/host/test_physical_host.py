"""Virtual machines of one host are recognized by the identification of the hypervisor; bare metal is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from checklist.checks.host.physical_host import physical_host
from tests.checklist.checks.host.files import host

VIRTUAL = {"proc__cpuinfo": "processor : 0\nflags : fpu hypervisor lahf_lm\n"}


def pool(**values: str) -> str:
    """Key-value pairs as hv_kvp_daemon writes them."""
    return "".join(key.ljust(512, "\0") + value.ljust(2048, "\0") for key, value in values.items())


def test_the_physical_host_is_read_from_hyper_v(tmp_path: Path) -> None:
    pairs = pool(HostName="cluster.example", PhysicalHostName="HOST-12", VirtualMachineName="a")
    assert physical_host(host(tmp_path, **VIRTUAL, **{"var__lib__hyperv__.kvp_pool_3": pairs})) == "HOST-12"


@pytest.mark.parametrize("serial", ["Not Specified", "Default string", "0", ""])
def test_a_board_without_a_serial_number_identifies_no_host(tmp_path: Path, serial: str) -> None:
    assert physical_host(host(tmp_path, **VIRTUAL, sys__class__dmi__id__board_serial=serial)) is None


def test_a_board_serial_number_identifies_the_host_of_virtual_machines_only_and_is_hashed(
    tmp_path: Path,
) -> None:
    serial = {"sys__class__dmi__id__board_serial": "CN7475174N0123\n"}
    virtual = physical_host(host(tmp_path / "a", **VIRTUAL, **serial))
    assert virtual is not None
    assert virtual == physical_host(host(tmp_path / "b", **VIRTUAL, **serial))
    assert "CN747" not in str(virtual)
    assert physical_host(host(tmp_path / "c", proc__cpuinfo="flags : fpu\n", **serial)) is None
