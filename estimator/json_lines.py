"""File of JSON lines to which several processes may append concurrently; each line is written atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_SECONDS = 5.0  # a writer holds the lock for one line; a longer wait is a file system without locks


def append(path: Path, line: str) -> None:
    """Append one line to a file, created if missing; raises OSError if it cannot be written or locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = line + "\n"
    with path.open("a+b") as file, _locked(file.fileno(), fcntl.LOCK_EX):
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            text = "\n" + text  # a writer was killed in the middle of its line
        try:
            _write(file.fileno(), text.encode())
            os.fsync(file.fileno())
        except OSError:  # a full disk
            with contextlib.suppress(OSError):
                os.truncate(file.fileno(), size)
            raise


def read(path: Path) -> list[str]:
    """Read all lines of a file, the last of which may be incomplete. Raises OSError."""
    with path.open("rb") as file, _locked(file.fileno(), fcntl.LOCK_SH, required=False):
        return file.read().decode(errors="replace").splitlines()


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _locked(descriptor: int, kind: int, *, required: bool = True) -> Iterator[None]:
    """Context in which the file is locked, for one read or one line written.

    Unless ``required``, the file is used without a lock if locking fails: at worst, half a line is skipped.
    """
    try:
        _lock(descriptor, kind)
    except OSError:
        if required:
            raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # closing the file gives the lock back as well
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int, kind: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while not _has_locked(descriptor, kind):
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has held the file for {LOCK_SECONDS:g} s")
        time.sleep(0.01)


def _has_locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
