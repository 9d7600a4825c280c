"""Log files of a run, kept in its datastore below ``logs/RUN/``.

``launch.log`` is the log of the process that launched the run: planning and requests to the cluster.
``STEP/TASK-ATTEMPT.log`` is the log of one attempt of a task.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metaflow import current

from decorators._metaflow import run_id
from decorators.s3_datastore import stop_waiting
from decorators.storage import datastore
from estimator import logs

_NAME = "finetune.log"
_log = logging.getLogger(__name__)


@contextmanager
def recorded_launch() -> Iterator[None]:
    """Record the log of a process that launches or resumes a run; do nothing in other processes."""
    if not {"run", "resume"} & set(sys.argv[1:]):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="finetune-log-") as folder:
        file = Path(folder, _NAME)
        try:
            with logs.recording(file):
                yield
        except (SystemExit, Exception):
            _store(file, "launch.log", retry=False)  # the last message stays that of the failed run
            raise
        _store(file, "launch.log")


@contextmanager
def recorded_task(work_dir: Path) -> Iterator[None]:
    """Record the log of this attempt of a task in its work folder; store it when the block ends.

    A task that is being stopped by a signal stores nothing: it has seconds left, and checkpoints need them.
    """
    file = work_dir / _NAME
    key = f"{current.step_name}/{current.task_id}-{current.retry_count}.log"
    try:
        with logs.recording(file):
            yield
    except Exception:
        _store(file, key)
        raise
    _store(file, key)


def _store(file: Path, name: str, *, retry: bool = True) -> None:
    """Copy a log into the datastore; a failure is logged and does not change how the run ends."""
    try:
        if not retry:
            stop_waiting()
        run = run_id()
        if run != "None" and file.exists() and file.stat().st_size:
            datastore().put_file(f"logs/{run}/{name}", file)
    except Exception as error:  # noqa: BLE001 - any error of a datastore
        _log.info("The log %s was not stored: %s: %s", name, type(error).__name__, error)
