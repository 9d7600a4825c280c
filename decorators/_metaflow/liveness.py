"""Whether an unfinished run still runs."""

from __future__ import annotations

import time
from typing import Any

import psutil
from metaflow import get_metadata

HEARTBEAT_LIMIT_S = 120.0  # Metaflow sends a heartbeat every 10 seconds
BETWEEN_TASKS_S = 2.0  # a local run has no task process for a moment between two steps


def is_alive(run: Any) -> bool | None:
    """Return whether a run that has not finished still runs; None if that cannot be determined.

    With the metadata service the run's heartbeats decide, with local metadata the processes of its tasks on
    this machine.
    """
    if not get_metadata().startswith("local@"):
        heartbeat = run._object.get("last_heartbeat_ts")
        return None if heartbeat is None else time.time() - float(heartbeat) < HEARTBEAT_LIMIT_S
    if _has_process(run.id):
        return True
    time.sleep(BETWEEN_TASKS_S)
    return _has_process(run.id)


def _has_process(run_id: str) -> bool:
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or ()
        if "--run-id" in arguments and run_id in arguments:
            return True
    return False
