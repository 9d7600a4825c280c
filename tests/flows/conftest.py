"""Runs of a flow as a user starts them, each in its own folder, and their artifacts."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from tests.conftest import write_sums
from tests.launchers.harness.files import write_task

FLOW = Path(__file__).parents[2] / "flows" / "finetune_flow.py"
STEPS = 24
FORMS = {"torchtune": ".csv", "deepspeed": ".json", "fsdp2": ".parquet"}  # of the data of finished runs
EVERY = 3  # steps from checkpoint to checkpoint
EVALUATED = 8  # steps from evaluation to evaluation
QUICK = [
    f"--max-steps={STEPS}",
    f"--checkpoint-every={EVERY}",
    "--epochs=2",
    "--global-batch-size=4",
    "--seq-len=128",
    "--set=evaluation.generations=1",
    "--set=evaluation.max_new_tokens=8",
    "--set=evaluation.fraction=0.1",
]
# Of runs that something more is looked at of: a task beside them has its rows in sums.jsonl
MORE = {("fsdp2", "lora", 1): ["--adapter-only", "--eval-harness=sums.yaml", "--set=harness.limit=6"]}
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
    """A finished run of a flow."""

    home: Path
    environment: dict[str, str]
    returncode: int
    output: str  # standard output and error as they came
    seconds: float
    run_id: str = ""  # empty: the command started no run

    @property
    def text(self) -> str:
        """The output without Metaflow prefixes and line breaks."""
        lines = (re.sub(r"^\S+ \S+ \[[^]]*\] ", "", line) for line in self.output.splitlines())
        return " ".join(" ".join(lines).split())

    def artifacts(self, flow: str = "FinetuneFlow") -> dict[str, Any]:
        """Read all artifacts of finished tasks by name; later steps override earlier ones."""
        return read_artifacts(self.home, self.environment, f"{flow}/{self.run_id}")

    def card(self, flow: Path, step: str, card_id: str) -> str:
        """Read the content of a step's card."""
        return read_card(self.home, self.environment, flow, f"{self.run_id}/{step}", card_id)


def read_artifacts(home: Path, environment: dict[str, str], run: str) -> dict[str, Any]:
    """Read artifacts of finished tasks by name, with the Metaflow client; later steps take precedence."""
    read = subprocess.run(
        [sys.executable, "-c", READ_ARTIFACTS, run],
        cwd=home,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    artifacts: dict[str, Any] = pickle.loads(read.stdout)  # noqa: S301
    return artifacts


def read_card(home: Path, environment: dict[str, str], flow: Path, task: str, card_id: str) -> str:
    """Read the content of a task's card."""
    shown = subprocess.run(
        [sys.executable, str(flow), "card", "get", task, "--id", card_id],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=480,
    )
    return content_of_card(shown.stdout)


def content_of_card(page: str) -> str:
    """Decode the content of a card page."""
    data = re.search(r'__MF_DATA__\["[^"]*"\] = "([^"]+)"', page)
    assert data is not None, page[:1000]
    return base64.b64decode(data[1]).decode()


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return a user's environment with every folder below ``home``; downloads are disabled."""
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ}
    return inherited | {
        "METAFLOW_USER": "tester",
        "METAFLOW_DEFAULT_DATASTORE": "local",
        "METAFLOW_DEFAULT_METADATA": "local",
        "METAFLOW_CLIENT_CACHE_PATH": str(home / "client-cache"),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(home),  # not a .metaflow of some folder above it
        "FINETUNE_WORK_DIR": str(home / "work"),
        "FINETUNE_CALIBRATION": str(home / "calibration.jsonl"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }


def start_flow(
    home: Path, arguments: list[str], flow: Path = FLOW, **variables: str
) -> subprocess.Popen[str]:
    """Start a flow; its output goes to ``home/log``."""
    # A shell's background jobs ignore a Ctrl-C, and so would this if pytest were one
    command = ["env", "--default-signal=INT", sys.executable, str(flow), *arguments]
    if "run" in arguments or "resume" in arguments:  # options of the flow may come before
        command += ["--run-id-file", str(home / "run_id")]
    with (home / "log").open("w") as log:
        return subprocess.Popen(
            command,
            cwd=home,
            env=environment(home, **variables),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as in a terminal of its own
        )


def run_flow(
    home: Path,
    *arguments: str,
    timeout: float = 400,
    flow: Path = FLOW,
    inject_fault: Callable[[subprocess.Popen[str]], None] = lambda _: None,
    **variables: str,
) -> FlowRun:
    """Run a flow in the folder ``home`` to its end, and inject a fault; no process may be left."""
    began = time.monotonic()
    (home / "run_id").unlink(missing_ok=True)
    process = start_flow(home, list(arguments), flow, **variables)
    try:
        inject_fault(process)
        process.wait(timeout)
    finally:
        if process.poll() is None:
            process.kill()
    ended = FlowRun(
        home=home,
        environment=environment(home, **variables),
        returncode=process.returncode,
        output=(home / "log").read_text(),
        seconds=time.monotonic() - began,
        run_id=(home / "run_id").read_text() if (home / "run_id").exists() else "",
    )
    assert left_behind(home) == []
    return ended


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Callable[..., FlowRun]]:
    """``flow("run", "--model", "tiny-llama", timeout=300)`` runs to the end; no process may be left."""
    yield functools.partial(run_flow, tmp_path)
    for process in left_behind(tmp_path, wait_s=0):
        process.kill()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], FlowRun]:
    """``finished_run("torchtune", "lora", 2)``: an undisturbed run of that engine and method on two nodes.

    It is trained once, with the settings ``QUICK`` on the rows of ``write_sums``, by whichever of pytest's
    processes asks first. Its folder is for reading only. ``FINISHED_RUNS``, which ``.ci/run`` sets, names a
    folder of runs that both tiers use.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # which all workers share
    runs = Path(os.environ.get("FINISHED_RUNS", base / "finished-runs"))
    runs.mkdir(exist_ok=True)

    def run(engine: str, method: str, nodes: int) -> FlowRun:
        home = runs / f"{engine}-{method}-{nodes}"
        ended = home.with_suffix(".json")
        with FileLock(home.with_suffix(".lock"), timeout=500):
            if not ended.exists():
                shutil.rmtree(home, ignore_errors=True)  # of a process that was killed while it trained
                home.mkdir()
                chosen = [f"--engine={engine}", f"--method={method}", f"--nodes={nodes}"]
                chosen.append(f"--eval-every={EVALUATED}")
                data = write_sums(home / f"my sums{FORMS[engine]}")
                if extra_lines := MORE.get((engine, method, nodes)):
                    chosen += extra_lines
                    write_task(home)
                    write_sums(home / "sums.jsonl")
                trained = run_flow(home, "run", *chosen, f"--dataset={data}", *QUICK)
                assert trained.returncode == 0, trained.output
                ended.write_text(json.dumps({**dataclasses.asdict(trained), "home": str(home)}))
        return FlowRun(**{**json.loads(ended.read_text()), "home": home})

    return run


def left_behind(home: Path, wait_s: float = 15) -> list[psutil.Process]:
    """Return processes that still have the work folder of this test in their environment."""
    deadline = time.monotonic() + wait_s
    while True:
        processes = [p for p in psutil.process_iter() if p.pid != os.getpid() and _belongs(p, home)]
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.3)


def _belongs(process: psutil.Process, home: Path) -> bool:
    try:
        return process.environ().get("FINETUNE_WORK_DIR") == str(home / "work") and (
            process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
