"""Settings of a host from /proc and /sys, without root; host-specific values are omitted."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from checklist.checks.host import settings_probe
from checklist.measurements import Nic
from tests.checklist.checks.host.files import host

LINE = (
    "BOOT_IMAGE=(hd0,gpt1)/vmlinuz root=UUID=5c9ab2c1-90d1-4a0f-b52f-6f2b1b0b6a11 ro console=ttyS0 quiet "
    "iommu=pt intel_iommu=on hugepagesz=1G hugepages=8 hugepagesz=2M hugepages=512 nosmt -- --token secret"
)


def read(root: Path) -> dict[str, str]:
    return settings_probe.read((), None, root)


def test_only_performance_options_of_the_kernel_command_line_are_reported(tmp_path: Path) -> None:
    reported = read(host(tmp_path, proc__cmdline=LINE))
    expected_options = {
        name: value for name, value in reported.items() if name.startswith(settings_probe.PARAMETER)
    }
    assert expected_options == {
        "kernel parameter iommu": "pt",
        "kernel parameter intel_iommu": "on",
        "kernel parameter hugepagesz": "1G 2M",
        "kernel parameter hugepages": "8 512",
        "kernel parameter nosmt": "set",
    }
    assert "UUID" not in str(reported)
    assert "secret" not in str(reported)


def test_missing_settings_are_omitted(tmp_path: Path) -> None:
    assert set(read(tmp_path)) == {"kernel release", "ulimit memlock", "ulimit nofile"}


def test_cpu_governors_and_selected_values_are_reported(tmp_path: Path) -> None:
    cpu = "sys__devices__system__cpu__cpu{}__cpufreq__scaling_governor"
    files = {cpu.format(number): "performance\n" if number else "powersave\n" for number in range(4)}
    files["sys__kernel__mm__transparent_hugepage__enabled"] = "always [madvise] never\n"
    files["sys__kernel__mm__hugepages__hugepages-2048kB__nr_hugepages"] = "5128\n"
    files["proc__sys__net__ipv4__tcp_rmem"] = "4096\t131072\t6291456\n"
    reported = read(host(tmp_path, **files))
    assert reported["CPU governor"] == "performance, powersave"
    assert (reported["transparent huge pages, enabled"], reported["huge pages of 2048kB"]) == (
        "madvise",
        "5128",
    )
    assert reported["net.ipv4.tcp_rmem"] == "4096 131072 6291456"


def bridge(*, acs: int, shown: int = 4096) -> bytes:
    """A device whose second extended capability is ACS."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 0x148 << 20)
    struct.pack_into("<I", config, 0x148, 0x000D)
    struct.pack_into("<H", config, 0x148 + 6, acs)
    return bytes(config[:shown])


@pytest.mark.parametrize(("shown", "reported"), [(4096, "1"), (64, None)])
def test_acs_is_read_by_root_and_unknown_otherwise(tmp_path: Path, shown: int, reported: str | None) -> None:
    for number, acs in enumerate((0x1D, 0x01)):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:01.0"
        device.mkdir(parents=True)
        (device / "config").write_bytes(bridge(acs=acs, shown=shown))
    assert read(tmp_path).get("PCI devices that ACS redirects") == reported


def test_iommu_domains_are_reported_by_type(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/iommu_groups").mkdir(parents=True)
    assert read(tmp_path)["IOMMU domains"] == "off"
    host(tmp_path, sys__kernel__iommu_groups__0__type="identity", sys__kernel__iommu_groups__7__type="DMA-FQ")
    assert read(tmp_path)["IOMMU domains"] == "DMA-FQ, identity"


def test_firmware_and_mtu_are_reported_by_driver_instead_of_interface_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = []
    for number, mtu in enumerate((9000, 9000, 1500)):
        (tmp_path / f"sys/class/net/ens{number}/device").mkdir(parents=True)
        every.append(Nic(name=f"ens{number}", mtu=mtu))
    monkeypatch.setattr(settings_probe, "_driver", lambda _: ("mlx5_core", "24.04", "28.39.1002"))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/fw_ver").write_text("28.39.1002\n")
    reported = settings_probe.read((*every, Nic(name="veth0", mtu=1450)), "ens0", tmp_path)
    assert (reported["MTU of mlx5_core"], reported["MTU of the interface in use"]) == ("1500, 9000", "9000")
    assert (reported["driver mlx5_core"], reported["firmware of mlx5_core"]) == ("24.04", "28.39.1002")
    assert reported["RDMA firmware of mlx5"] == "28.39.1002"
