"""``python -m checklist`` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checklist.result import read

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
)


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
    return {**kept, "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true", **more}


def checklist(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "checklist", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=environment(**more),
    )


def of_this_run(marker: str) -> list[int]:
    """Living processes that have the marker in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"CHECKLIST_JOB={marker}".encode() not in (entry / "environ").read_bytes():
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.slow
def test_without_options_two_local_nodes_are_measured_in_a_minute_and_a_verdict_is_printed(
    tmp_path: Path,
) -> None:
    begin = time.monotonic()
    done = checklist("--json", str(tmp_path / "out.json"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begin < 60
    assert "PASS:" in done.stdout
    result = read(tmp_path / "out.json")
    assert result.verdict == "PASS"
    assert {phase.name: phase.status for phase in result.measurements.phases} == dict.fromkeys(
        ("facts", "mesh", "node", "world", "pairs"), "done"
    )


@pytest.mark.slow
def test_under_torchrun_each_process_takes_part_in_one_job(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "checklist"]
    options = ["--only", "ranks,correctness", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, *command, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    result = read(tmp_path / "out.json")
    assert len(result.measurements.facts) == 2
    assert result.measurements.nodes == (0,)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--only", "gem"), "There is no check 'gem'."),
        (("--nodes", "0"), "--nodes 0 is not possible."),
        (("--profile", "quik"), "There is no profile 'quik'."),
        (("--thresholds", "/nowhere/own.csv"), "/nowhere/own.csv"),
        (("--json", "/nowhere/out.json"), "/nowhere/out.json can't be written."),
        (("--timeout", "-1"), "A time limit of -1"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_line_and_ends_with_status_2(
    arguments: tuple[str, ...], line: str
) -> None:
    done = checklist(*arguments)

    assert done.returncode == 2
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_whose_rank_0_is_not_there_gives_up_with_the_address(tmp_path: Path) -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host", "MASTER_PORT": "29500"}
    code = (
        "import sys, checklist.supervisor as s; from checklist.control import Limits;"
        "s.limits_of = lambda options: Limits(rendezvous=1.0);"
        "from checklist.__main__ import app; app()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(**launcher),
    )

    assert done.returncode == 2
    assert "no-such-host" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_run_is_killed_no_process_is_left(tmp_path: Path, how: signal.Signals) -> None:
    marker = f"{how.name}-{os.getpid()}-{tmp_path.name}"
    process = subprocess.Popen(
        [sys.executable, "-m", "checklist", "--keep", str(tmp_path)],
        env=environment(CHECKLIST_JOB=marker),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(of_this_run(marker)) < 4 and time.monotonic() < deadline:  # two nodes, two workers
        time.sleep(0.05)
    assert len(of_this_run(marker)) == 4
    process.send_signal(how)
    process.wait(timeout=20)

    deadline = time.monotonic() + 15
    while of_this_run(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert of_this_run(marker) == []
