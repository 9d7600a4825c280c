"""Capabilities and limits of pods of the test bed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lab import pods
from tests.lab.pods import Exit, Hub, PodSpec

pytestmark = pytest.mark.skipif(pods.missing() is not None, reason=str(pods.missing()))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub")) as machines:
        yield machines


Say = Callable[..., tuple[Exit, str]]


@pytest.fixture
def run_in_pod(hub: Hub) -> Say:
    """Run a shell line in a pod; return exit and output."""

    def run(line: str, **overrides: Any) -> tuple[Exit, str]:
        spec = {"name": "p", "hostname": "p", "command": ("bash", "-c", line)} | overrides
        pod = hub.start(PodSpec(**spec))
        ended = pod.wait(60)
        return ended, pod.log.read_text()

    return run


def test_a_pod_cannot_change_the_machine(run_in_pod: Say) -> None:
    target = ROOT / "written-by-a-pod"
    ended, printed = run_in_pod(f"touch '{target}' /etc/hosts2")
    assert ended.code == 1
    assert printed.count("Read-only file system") == 2
    assert not target.exists()


def test_a_killed_pod_leaves_no_process(hub: Hub) -> None:
    line = "setsid sleep 1000 & trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.1; done"
    pods_ = [hub.start(PodSpec(name="k", hostname="k", command=("bash", "-c", line))) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not all(pod.log.read_text() for pod in pods_):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(len(pod.pids()) >= 2 for pod in pods_)
    pods_[0].kill()
    pods_[1].kill(grace_s=30)
    assert [pod.poll() for pod in pods_] == [Exit(code=137, reason="Error"), Exit(code=3, reason="Error")]
    assert pods_[1].log.read_text() == "up\nasked\n"
    assert [pod.pids() for pod in pods_] == [[], []]


def test_a_hook_has_the_environment_of_its_pod(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/of-the-tests")
    line = "echo up; until [ -e /tmp/hook ]; do sleep 0.1; done; cat /tmp/hook"
    spec = PodSpec(name="h", hostname="h", command=("bash", "-c", line), environment={"OF_THE_POD": "yes"})
    pod = hub.start(spec)
    deadline = time.monotonic() + 60
    while not pod.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pod.run(("sh", "-c", 'echo "${TMPDIR:-none} $OF_THE_POD" >/tmp/new; mv /tmp/new /tmp/hook'))
    pod.wait(60)
    assert pod.log.read_text() == "up\nnone yes\n"


BED = """
import sys, time
from pathlib import Path
import psutil
from tests.lab.pods import Hub, PodSpec
with Hub(Path(sys.argv[1])) as hub:
    hub.popen(["sleep", "1003"])
    pod = hub.start(PodSpec(name="p", hostname="p", command=("sleep", "1003"), memory_bytes=2**28))
    while not any(p.pid in pod.pids() and p.info["name"] == "sleep" for p in psutil.process_iter(["name"])):
        time.sleep(0.05)
    print("up", *pod.pids(), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_pods_end_with_the_test_process(tmp_path: Path) -> None:
    test = subprocess.Popen(
        [sys.executable, "-c", BED, str(tmp_path / "hub")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        line = test.stdout.readline()
        assert line.startswith("up")
        child_pids = {process.pid for process in psutil.Process(test.pid).children(recursive=True)}
        sleeping = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "sleep"]
        doomed = [process for process in sleeping if process.pid in child_pids]
        assert len(doomed) == 2
    finally:
        test.kill()
        test.communicate(timeout=10)
    _, alive = psutil.wait_procs(doomed, timeout=30)
    assert not alive
