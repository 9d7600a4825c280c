"""Runs the flow as a user does, in a folder of its own, and reads the artifacts back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

FLOW = Path(__file__).parents[2] / "flows" / "finetune_flow.py"
QUICK = [
    "--max-steps=8",
    "--global-batch-size=4",
    "--seq-len=128",
    "--set=evaluation.generations=1",
    "--set=evaluation.max_new_tokens=8",
    "--set=evaluation.fraction=0.1",
]
READ_ARTIFACTS = """
import sys, pickle
from metaflow import Run, namespace
namespace(None)
run = Run(sys.argv[1])
found = {}
for step in reversed(list(run.steps())):
    for task in step.tasks():
        if task.finished:
            found |= {artifact.id: artifact.data for artifact in task.artifacts if artifact.id[0] != "_"}
pickle.dump(found, sys.stdout.buffer)
"""


@dataclass
class FlowRun:
    """A run of the flow that has ended."""

    home: Path
    environment: dict[str, str]
    returncode: int
    output: str  # standard output and error as they came
    seconds: float

    @property
    def run_id(self) -> str:
        return (self.home / "run_id").read_text()

    def artifacts(self) -> dict[str, Any]:
        """All artifacts of the finished tasks by name; a later step's win."""
        import pickle

        read = subprocess.run(
            [sys.executable, "-c", READ_ARTIFACTS, f"FinetuneFlow/{self.run_id}"],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        found: dict[str, Any] = pickle.loads(read.stdout)  # noqa: S301
        return found


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's environment whose every folder lies below ``home``; nothing is fetched from a hub."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ}
    return kept | {
        "METAFLOW_USER": "tester",
        "METAFLOW_DEFAULT_DATASTORE": "local",
        "METAFLOW_DEFAULT_METADATA": "local",
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(home),  # not a .metaflow of some folder above it
        "FINETUNE_WORK_DIR": str(home / "work"),
        "FINETUNE_CALIBRATION": str(home / "calibration.jsonl"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def start_flow(home: Path, arguments: list[str], **more: str) -> subprocess.Popen[str]:
    """Start the flow; its output goes to ``home/log``."""
    command = [sys.executable, str(FLOW), *arguments]
    if arguments and arguments[0] in ("run", "resume"):
        command += ["--run-id-file", str(home / "run_id")]
    with (home / "log").open("w") as log:
        return subprocess.Popen(
            command,
            cwd=home,
            env=environment(home, **more),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as in a terminal of its own
        )


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Callable[..., FlowRun]]:
    """``flow("run", "--model", "tiny-llama", timeout=300)`` runs to the end; no process may be left."""

    def run(*arguments: str, timeout: float = 400, **more: str) -> FlowRun:
        began = time.monotonic()
        process = start_flow(tmp_path, list(arguments), **more)
        try:
            process.wait(timeout)
        finally:
            if process.poll() is None:
                process.kill()
        ended = FlowRun(
            home=tmp_path,
            environment=environment(tmp_path, **more),
            returncode=process.returncode,
            output=(tmp_path / "log").read_text(),
            seconds=time.monotonic() - began,
        )
        assert left_behind(tmp_path) == []
        return ended

    yield run
    for process in left_behind(tmp_path, wait_s=0):
        process.kill()


def left_behind(home: Path, wait_s: float = 15) -> list[psutil.Process]:
    """Processes that still carry this test's work folder in their environment."""
    deadline = time.monotonic() + wait_s
    while True:
        found = [p for p in psutil.process_iter() if p.pid != os.getpid() and _belongs(p, home)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def _belongs(process: psutil.Process, home: Path) -> bool:
    try:
        return process.environ().get("FINETUNE_WORK_DIR") == str(home / "work") and (
            process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
