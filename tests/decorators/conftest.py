"""Runs of the small flows in flows/ as a user starts them, each in its own folder."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.warm_python import WarmPython

FLOWS = Path(__file__).parent / "flows"
_READ = """
import pickle, sys
from metaflow import Flow, namespace
namespace(None)
data = Flow(sys.argv[2]).latest_run[sys.argv[3]].task.data
with open(sys.argv[1], "wb") as file:
    pickle.dump({name: getattr(data, name, None) for name in sys.argv[4:]}, file)
"""


@dataclass
class Home:
    """A folder with its own local datastore."""

    path: Path
    warm: WarmPython | None = None  # runs the flows instead of a new Python

    def environment(self, **variables: str) -> dict[str, str]:
        inherited = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ
        }
        return inherited | {
            "METAFLOW_USER": "tester",
            "METAFLOW_DEFAULT_DATASTORE": "local",
            "METAFLOW_DEFAULT_METADATA": "local",
            "METAFLOW_CLIENT_CACHE_PATH": str(self.path / "client-cache"),
            "PYTHONUNBUFFERED": "1",
            "FINETUNE_CALIBRATION": str(self.path / "calibration.jsonl"),
            **variables,
        }

    def run(self, flow: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._run(str(FLOWS / flow), *arguments, **environment)

    def _run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        if self.warm is None:
            return self.python(*arguments, **environment)
        return self.warm.run(arguments, folder=self.path, environment=self.environment(**environment))

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments in the folder."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def start(self, flow: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a flow in its own process group; its output goes to ``output.txt``."""
        with (self.path / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, str(FLOWS / flow), *arguments],
                cwd=self.path,
                env=self.environment(**environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def artifacts(self, flow: str, step: str, *names: str) -> dict[str, Any]:
        """Return artifacts of a step of the latest run."""
        script, file = self.path / "read_artifacts.py", self.path / "artifacts.pickle"
        script.write_text(_READ)
        done = self._run(str(script), str(file), flow, step, *names)
        assert done.returncode == 0, done.stderr
        return dict(pickle.loads(file.read_bytes()))  # noqa: S301

    def runs(self, flow: str) -> list[str]:
        folder = self.path / ".metaflow" / flow
        return [p.name for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / ".metaflow").mkdir()  # else Metaflow would look for one in the folders above
    return Home(tmp_path)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true value of a condition; fails the test after the time limit."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} seconds")
