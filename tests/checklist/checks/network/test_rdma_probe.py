"""RDMA ports as read from the kernel."""

from __future__ import annotations

from pathlib import Path

from checklist.checks.network.rdma_probe import ports
from checklist.measurements import RdmaPort

SAMPLE = Path(__file__).with_name("infiniband.txt")  # as `grep -r . /sys/class/infiniband` prints
ROOT = "/sys/class/infiniband/"


def tree(place: Path, sample: str) -> Path:
    """Create the device files of a host."""
    for line in sample.splitlines():
        name, _, text = line.partition(":")
        file = place / name.removeprefix(ROOT)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return place


def test_state_rate_and_board_id_of_each_port_are_read(tmp_path: Path) -> None:
    reported = {port.name: port for port in ports(tree(tmp_path, SAMPLE.read_text()))}
    assert len(reported) == 6
    assert reported["mlx5_0/1"] == RdmaPort(
        name="mlx5_0/1",
        model="MT_0000000838",
        state="ACTIVE",
        physical="LinkUp",
        gbps=400.0,
        layer="InfiniBand",
    )
    assert (reported["mlx5_1/1"].layer, reported["mlx5_1/1"].model) == ("Ethernet", "MT_0000000359")
    assert (reported["mlx5_4/1"].state, reported["mlx5_4/1"].physical) == ("DOWN", "Polling")
    assert reported["mlx5_3/1"].gbps == 200.0


def test_values_that_a_driver_does_not_report_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "efa_0" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "efa_0" / "ports" / "1" / "rate").write_text("odd\n")
    assert ports(tmp_path) == (RdmaPort(name="efa_0/1"),)
    assert ports(tmp_path / "none") == ()
