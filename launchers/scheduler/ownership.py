"""Ownership: one job at a time writes into an output folder."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType

from estimator.errors import UserError

BEAT_S = 10.0
STALE_S = 90.0  # without a beat; more than the 60 s for which NFS may show an old time


class Ownership:
    """While it lasts, ``folder/owner.json`` says which job is at work, renewed every ``BEAT_S``.

    A job that is requeued takes over from itself. Raises UserError where another one is at work.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path = folder / "owner.json"
        self._job = job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ownership", daemon=True)

    def __enter__(self) -> Ownership:
        other = None if self._claim() else self._other()
        if other is not None:
            raise UserError(
                f"Job {other} is writing into {self._path.parent.parent} at this moment.",
                f"Give another --output; or end that job, and wait {STALE_S:g} s.",
            )
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(BEAT_S)
        self._path.unlink(missing_ok=True)

    def _other(self) -> str | None:
        """The other job that has shown signs of life lately."""
        try:
            age = time.time() - self._path.stat().st_mtime
            job = str(json.loads(self._path.read_text())["job"])
        except (OSError, ValueError, KeyError):
            return None
        return job if job != self._job and age < STALE_S else None

    def _claim(self) -> bool:
        """Make the file where there is none. Of two jobs that begin at once, one does."""
        temporary = self._write_beside()
        try:
            self._path.hardlink_to(temporary)
        except OSError:  # it is there; or the file system has no links, then looking at it must do
            return False
        finally:
            temporary.unlink()
        return True

    def _write(self) -> None:
        self._write_beside().replace(self._path)

    def _write_beside(self) -> Path:
        """A new file with what the claim says, in the claim's folder."""
        temporary = self._path.with_name(f"owner.{uuid.uuid4().hex[:8]}.tmp")
        temporary.write_text(json.dumps({"job": self._job, "host": socket.gethostname()}))
        return temporary

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full or absent file system: the training itself says so
                self._write()
