"""How a run ends, and what doesn't end it."""

from __future__ import annotations

import os
import signal

from tests.decorators.conftest import Home, wait_until


def test_a_run_and_its_tasks_outlive_the_terminal_they_were_started_from(home: Home) -> None:
    flow = home.start("profiled.py", "run", "--seconds=2")
    try:
        output = home.path / "output.txt"
        wait_until(lambda: "began at" in output.read_text() or flow.poll() is not None)
        os.killpg(flow.pid, signal.SIGHUP)
        assert flow.wait(60) == 0, output.read_text()
    finally:
        flow.kill()
        flow.wait()
