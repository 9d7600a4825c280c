"""The work folders of running tasks, below the machine's temporary folder (FINETUNE_WORK_DIR changes it).

A task removes its own folder when it ends; what a killed task has left is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from estimator.errors import UserError
from launchers import full_disk

ROOM = (
    "Free some space there, ask for a larger disk, or name another: export FINETUNE_WORK_DIR=/a/larger/disk"
)


def root() -> Path:
    """Where the work folders of this machine lie; each user's apart, as one can't write into another's."""
    own = Path(tempfile.gettempdir()) / f"metaflow-finetune-{os.getuid()}"
    return Path(os.environ.get("FINETUNE_WORK_DIR") or own)


@contextmanager
def work_folder(run_id: str, step: str, task_id: str) -> Iterator[Path]:
    """An empty folder for one attempt of one task.

    Raises UserError where none can be made, and instead of an OSError of a full disk while it is in use.
    """
    base = root()
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        folder = Path(tempfile.mkdtemp(prefix=f"{run_id}-{step}-{task_id}-", dir=base))
        owner = _own(folder)
    except OSError as error:
        raise UserError(
            f"No work folder can be made in {base}: {error.strerror}.",
            "Name another place: export FINETUNE_WORK_DIR=/a/folder/on/a/local/disk",
        ) from None
    try:
        with owner, full_disk.said(folder, ROOM):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own(folder: Path) -> IO[str]:
    """Mark a folder as in use, as long as the file that is returned is open.

    By a lock, which the kernel lets go of when this process ends: a container that shares the folder can't
    see this process. The content is for people.
    """
    owner = (folder / "owner.new").open("w")
    _lock(owner)
    owner.write(f"{os.getpid()} {psutil.Process().create_time()}")
    owner.flush()
    (folder / "owner.new").rename(folder / "owner")
    return owner


def _sweep(base: Path) -> None:
    for path in base.glob("*/owner"):
        # One that can't be opened is being removed by its own task, or is another user's.
        with suppress(OSError), path.open("r+") as owner:
            if _lock(owner):
                shutil.rmtree(path.parent, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    """Whether nobody else holds the lock. A file system without locks has none to give: nothing is swept."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
