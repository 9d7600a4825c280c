"""A process and its children continue when their terminal hangs up."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
_COUNTS = """
import subprocess, sys, time
from launchers.cluster.hangup import outlive_shell
outlive_shell()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
for number in range(10):
    print("line", number)
    print("problem", number, file=sys.stderr)
    time.sleep(0.1)
print("the child ended with", child.wait())
"""


def test_a_run_outlives_its_terminal_and_continues_to_log_into_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _COUNTS]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(command[0], command)  # noqa: S606
    shown = b""
    while b"problem 3" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)  # the kernel sends SIGHUP to the whole group
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lines = (tmp_path / "nohup.out").read_text().splitlines()
    assert lines[-1] == "the child ended with 0"
    assert {"line 9", "problem 9"} <= set(lines)


def test_a_broken_output_pipe_does_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(_COUNTS)
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} counts.py 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "nohup.out").read_text().endswith("the child ended with 0\n")


def test_output_to_a_file_is_not_redirected(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", _COUNTS],
            {**os.environ, "PYTHONPATH": str(ROOT)},
            file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), 1), (os.POSIX_SPAWN_DUP2, file.fileno(), 2)],
        )
    deadline = time.monotonic() + 20
    while b"problem 3" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(pid, signal.SIGHUP)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "the child ended with 0" in log.read_text()


def test_only_output_to_a_terminal_or_pipe_is_replaced_by_a_stream_that_outlives_it(tmp_path: Path) -> None:
    code = "import sys; from launchers.cluster.hangup import outlive_shell; before = sys.stdout, sys.stderr; "
    code += "outlive_shell(); print(sys.stdout is before[0], sys.stderr is before[1])"
    with (tmp_path / "log").open("w+") as log:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=subprocess.PIPE, check=True)
        log.seek(0)
        assert log.read() == "True False\n"
