"""A killed run is distinguished from a running one."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from decorators._metaflow import liveness


@pytest.mark.parametrize(("age_s", "alive"), [(30, True), (300, False), (None, None)])
def test_a_run_with_a_recent_heartbeat_at_the_service_is_alive(
    age_s: float | None, alive: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "get_metadata", lambda: "service@https://metaflow.example")
    heartbeat = {} if age_s is None else {"last_heartbeat_ts": int(time.time() - age_s)}
    assert liveness.is_alive(SimpleNamespace(_object=heartbeat)) is alive


def test_a_local_run_is_alive_while_a_process_of_its_tasks_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "get_metadata", lambda: "local@/work")
    monkeypatch.setattr(liveness, "BETWEEN_TASKS_S", 0.0)
    run = SimpleNamespace(id="1795787815229591")
    command = [sys.executable, "-c", "import time; time.sleep(60)", "step", "train", "--run-id", run.id]
    with subprocess.Popen(command) as task:
        alive = liveness.is_alive(run)
        task.kill()
    assert (alive, liveness.is_alive(run)) == (True, False)
