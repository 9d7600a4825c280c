"""Ends of a run, and events that do not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from decorators._metaflow import endings
from decorators._metaflow.endings import ExecutionPhase, file_command, resume_command
from tests.decorators.conftest import FLOWS, Home, wait_until


@pytest.mark.slow
def test_a_run_and_its_tasks_outlive_their_terminal(home: Home) -> None:
    flow = home.start("profiled.py", "run", "--seconds=2")
    try:
        output = home.path / "output.txt"
        wait_until(lambda: "/train/" in output.read_text() or flow.poll() is not None)
        os.killpg(flow.pid, signal.SIGHUP)
        assert flow.wait(60) == 0, output.read_text()
    finally:
        flow.kill()
        flow.wait()


def test_an_interrupted_run_prints_the_resume_command(home: Home) -> None:
    flow = home.start("profiled.py", "--metadata=local", "run", "--seconds=60")
    try:
        output = home.path / "output.txt"
        wait_until(lambda: "/train/" in output.read_text() or flow.poll() is not None)
        os.killpg(flow.pid, signal.SIGINT)
        assert flow.wait(30) == 1, output.read_text()
    finally:
        flow.kill()
        flow.wait()
    (run_id,) = home.runs("ProfiledFlow")
    printed = output.read_text()
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("Resume the run: python ")
    assert last.endswith(f"profiled.py --metadata=local resume --origin-run-id {run_id}")
    assert printed.count("Resume the run") == 1


def test_output_to_a_full_disk_ends_a_run_in_two_lines(home: Home) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, FLOWS / "profiled.py", "run", "--seconds=1"],
            cwd=home.path,
            env=home.environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left on" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].lstrip().startswith("Free space")


def test_a_failed_virtual_environment_ends_with_what_is_wrong_and_what_to_do(home: Home) -> None:
    failing = home.environment(METAFLOW_PATH_TO_MICROMAMBA="/bin/false")
    done = subprocess.run(
        [sys.executable, FLOWS / "profiled.py", "--environment=pypi", "run"],
        cwd=home.path,
        env=failing,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "Error: Metaflow's --environment could not be created, for the reason above.",
        "Check the network and the package names, or leave --environment out.",
    ]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["f.py", "run", "--model", "m"], "python f.py resume --origin-run-id 7"),
        (["f.py", "--with", "retry", "run"], "python f.py --with retry resume --origin-run-id 7"),
        (
            ["f.py", "--config", "settings", "s.yaml", "run", "--with", "kubernetes:cpu=3"],
            "python f.py --with kubernetes:cpu=3 resume --origin-run-id 7",
        ),
        (["f.py", "resume", "--origin-run-id", "6"], "python f.py resume --origin-run-id 7"),
    ],
)
def test_the_resume_command_repeats_the_backend_options_of_the_run(
    arguments: list[str], command: str
) -> None:
    assert resume_command(arguments[0], arguments[1:], "7", file_command) == command


def test_reading_the_root_of_a_local_datastore_creates_no_folder(home: Home) -> None:
    code = "from decorators._metaflow.configuration import configuration as c; print(c().datastore, c().root)"
    (home.path / ".metaflow").rmdir()
    done = home.python("-c", code, PYTHONPATH=str(Path(__file__).parents[3]))
    assert done.stdout.split() == ["local", str(home.path / ".metaflow")], done.stderr
    assert not (home.path / ".metaflow").exists()


@pytest.mark.parametrize(
    ("phase", "attempt", "retries", "retried"),
    [
        (ExecutionPhase.TASK, 0, 1, True),
        (ExecutionPhase.TASK, 1, 1, False),
        (ExecutionPhase.TASK, None, None, False),
        (ExecutionPhase.LAUNCH, 0, 1, False),
    ],
)
def test_only_a_task_with_remaining_attempts_is_retried(
    phase: ExecutionPhase,
    attempt: int | None,
    retries: int | None,
    retried: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(phase=phase, retry_count=attempt, max_user_code_retries=retries)
    monkeypatch.setattr(endings, "system_context", context)
    assert endings._would_be_retried() is retried
