"""GPUs below one root port copy in turn; GPUs with separate links copy at the same time."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

from checklist.checks.gpu import pcie


def test_gpus_below_one_switch_share_one_root_port(tmp_path: Path) -> None:
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    tree = {
        "0000:18:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
        "0000:19:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0",
        "0000:2a:00.0": "pci0000:26/0000:26:01.0/0000:2a:00.0",
        "0000:00:1e.0": "pci0000:00/0000:00:1e.0",  # of a virtual machine
    }
    for address, path in tree.items():
        (tmp_path / "sys/devices" / path).mkdir(parents=True)
        (devices / address).symlink_to(tmp_path / "sys/devices" / path)
    ports = [pcie.root_port(address, tmp_path) for address in tree]
    assert ports == ["0000:15:01.0", "0000:15:01.0", "0000:26:01.0", "0000:00:1e.0"]
    assert pcie.root_port("0000:99:00.0", tmp_path) is None
    assert pcie.root_port(None, tmp_path) is None


def test_only_one_process_at_a_time_holds_the_pcie_link_and_waiting_has_a_limit() -> None:
    name, order = f"test {uuid.uuid4()}", []

    def second() -> None:
        with pcie.exclusive(name, 10.0) as free:
            order.append(f"second {free}")

    waiting = threading.Thread(target=second)
    with pcie.exclusive(name, 1.0) as free:
        waiting.start()
        with pcie.exclusive(name, 0.05) as busy:
            order.append(f"first {free}, third {busy}")
    waiting.join()
    assert order == ["first True, third False", "second True"]
