"""infra/aws/instance_store.sh on real block devices (loops), in its own mount namespace.

What isn't on every Linux is played: the disks' model, mdadm, which makes no array, and XFS, by ext4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "aws" / "instance_store.sh"
DISK_BYTES = 16 << 20
TOOLS = {
    "lsblk": 'for disk in $DISKS; do echo "$disk Amazon EC2 NVMe Instance Storage"; done\n'
    'echo "/dev/nvme0n1 Amazon Elastic Block Store"',
    "mdadm": 'echo "mdadm $*" >>"$CALLS"\n'
    '[ "$1" = --create ] && [ -z "$NO_ARRAY" ] && mkdir -p "${2%/*}" && ln -s "${!#}" "$2"',
    "mkfs.xfs": 'echo "mkfs.xfs $*" >>"$CALLS"\nexec mkfs.ext4 -q "${!#}"',
    "yum": "exit 1",
}


def missing() -> str | None:
    """Return the reason why it cannot be run here."""
    if os.geteuid() != 0:
        return "mounting disks needs root"
    absent = [tool for tool in ("unshare", "losetup", "mkfs.ext4", "blkid") if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)}"
    free = subprocess.run(["losetup", "--find"], capture_output=True, check=False)
    return None if free.returncode == 0 else "this machine has no loop devices"


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "")]


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[str]]:
    """Two blank disks."""
    disk_files: list[str] = []
    try:
        for number in range(2):
            file = tmp_path / f"disk{number}"
            file.touch()
            os.truncate(file, DISK_BYTES)
            command = ["losetup", "--find", "--show", str(file)]
            disk_files.append(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            )
        yield disk_files
    finally:
        for disk in disk_files:
            subprocess.run(["losetup", "--detach", disk], check=False)


def boot(home: Path, disks: list[str], *, times: int = 1, array: bool = True, mdadm: bool = True) -> str:
    """Run the script as at boot; return its output, the disk below the Docker folder, and a file in it."""
    tools, root = home / "bin", home / "root"
    tools.mkdir()
    for name, body in TOOLS.items():
        if name != "mdadm" or mdadm:
            (tools / name).write_text(f"#!/bin/bash\n{body}\n")
            (tools / name).chmod(0o755)
    for place in ("docker", "containerd"):
        (root / "var" / "lib" / place).mkdir(parents=True)
    (root / "var" / "lib" / "docker" / "image").write_text("of the AMI\n")
    script = SCRIPT.read_text()
    for place in ("/mnt/instance-store", "/dev/md/instance-store", "/var/lib/docker", "/var/lib/containerd"):
        assert place in script
        script = script.replace(place, f"{root}{place}")
    docker = root / "var" / "lib" / "docker"
    script += f"\ndf --output=source {docker}\ncat {docker}/image\n"
    runs = "\n".join(f"bash {home}/script.sh" for _ in range(times))
    (home / "script.sh").write_text(script)
    variables = {"DISKS": " ".join(disks), "CALLS": str(home / "calls"), "NO_ARRAY": "" if array else "1"}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", runs],
        env={**os.environ, **variables, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def calls(home: Path) -> list[str]:
    file = home / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_existing_docker_data_is_moved_to_a_single_disk(tmp_path: Path, disks: list[str]) -> None:
    output = boot(tmp_path, disks[:1])
    assert output.splitlines()[-2:] == [disks[0], "of the AMI"]
    assert calls(tmp_path) == [f"mkfs.xfs -q {disks[0]}"]


def test_several_disks_are_striped(tmp_path: Path, disks: list[str]) -> None:
    output = boot(tmp_path, disks)
    array = f"{tmp_path}/root/dev/md/instance-store"
    assert (output.splitlines()[-1], output.splitlines()[-2]) == ("of the AMI", disks[1])
    assert calls(tmp_path) == [
        f"mdadm --assemble {array} {' '.join(disks)}",
        f"mdadm --create {array} --run --level=0 --raid-devices=2 {' '.join(disks)}",
        f"mkfs.xfs -q {array}",
    ]


def test_a_second_boot_loses_nothing(tmp_path: Path, disks: list[str]) -> None:
    output = boot(tmp_path, disks[:1], times=2)
    assert output.splitlines()[-2:] == [disks[0], "of the AMI"]
    assert calls(tmp_path) == [f"mkfs.xfs -q {disks[0]}"]


@pytest.mark.parametrize(("count", "array", "mdadm"), [(0, True, True), (2, False, True), (2, True, False)])
def test_docker_stays_in_place_if_the_disks_cannot_be_used(
    tmp_path: Path, disks: list[str], count: int, array: bool, mdadm: bool
) -> None:
    output = boot(tmp_path, disks[:count], array=array, mdadm=mdadm)
    assert "instance store: none, or no array of it; Docker stays on the root disk" in output
    assert output.splitlines()[-1] == "of the AMI"
    assert output.splitlines()[-2] not in disks
    assert not any(call.startswith("mkfs") for call in calls(tmp_path))
