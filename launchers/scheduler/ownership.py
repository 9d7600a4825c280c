"""Lock that lets only one job at a time write into an output folder."""

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
STALE_S = 90.0  # age of an abandoned lock; more than the 60 s for which NFS may show an old time


class Ownership:
    """Context in which ``folder/owner.json`` names the job that writes there, renewed every ``BEAT_S``.

    A requeued job takes over its own lock. Raises UserError if another job is active.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path = folder / "owner.json"
        self._job = job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ownership", daemon=True)

    def __enter__(self) -> Ownership:
        owner = None if self._claim() else self._active_owner()
        if owner is not None:
            raise UserError(
                f"Job {owner} is writing into {self._path.parent.parent}.",
                f"Use another --output; or end that job, and wait {STALE_S:g} s.",
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

    def _active_owner(self) -> str | None:
        """Return another job that was active recently; None if there is none."""
        try:
            age = time.time() - self._path.stat().st_mtime
            job = str(json.loads(self._path.read_text())["job"])
        except (OSError, ValueError, KeyError):
            return None
        return job if job != self._job and age < STALE_S else None

    def _claim(self) -> bool:
        """Create the file if it does not exist. Of two jobs that start at once, only one succeeds."""
        temporary = self._write_temporary()
        try:
            self._path.hardlink_to(temporary)
        except OSError:  # exists already; or no hard links here, then reading the file must suffice
            return False
        finally:
            temporary.unlink()
        return True

    def _write(self) -> None:
        self._write_temporary().replace(self._path)

    def _write_temporary(self) -> Path:
        """Write the claim to a temporary file in the same folder."""
        temporary = self._path.with_name(f"owner.{uuid.uuid4().hex[:8]}.tmp")
        temporary.write_text(json.dumps({"job": self._job, "host": socket.gethostname()}))
        return temporary

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full or missing file system is reported by the training
                self._write()
