"""The work folders of running tasks, below the machine's temporary folder (FINETUNE_WORK_DIR changes it).

A task removes its own folder when it ends; what a killed task has left is removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def root() -> Path:
    """Where the work folders of this machine lie."""
    return Path(os.environ.get("FINETUNE_WORK_DIR") or Path(tempfile.gettempdir()) / "metaflow-finetune")


@contextmanager
def work_folder(run_id: str, step: str, task_id: str) -> Iterator[Path]:
    """An empty folder for one attempt of one task."""
    base = root()
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    folder = base / f"{run_id}-{step}-{task_id}-{os.getpid()}"
    folder.mkdir()
    (folder / "owner").write_text(f"{os.getpid()} {psutil.Process().create_time()}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    for owner in base.glob("*/owner"):
        try:
            pid, created = owner.read_text().split()
        except (OSError, ValueError):  # being made or removed by its own task
            continue
        if not _alive(int(pid), float(created)):
            shutil.rmtree(owner.parent, ignore_errors=True)


def _alive(pid: int, created: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - created) < 1
    except psutil.NoSuchProcess:
        return False
