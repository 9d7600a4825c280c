"""SyncedFolder: a folder of one node that is kept in the store while a script writes to it.

The folder is stored once no file in it has changed between two polls. A script that is killed while it
writes leaves the state before that in the store. Each node keeps a separate bundle; a restored folder has
the files of all nodes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from launchers.store.bundles import MANIFEST, Storage, fetch_files, put_bundle

POLL_S = 5.0
_log = logging.getLogger(__name__)
Snapshot = dict[str, tuple[int, int]]  # file -> (size, time of its last change in nanoseconds)


class SyncedFolder:
    """One node's folder.

    Parameters
    ----------
    storage:
        The run's storage, shared by all nodes.
    prefix:
        Key prefix of all nodes' bundles.
    folder:
        The local folder; created.
    """

    def __init__(self, storage: Storage, prefix: str, folder: Path, *, node: int = 0) -> None:
        self.folder = folder
        self._storage, self._prefix = storage, prefix
        self._key = f"{prefix}/node-{node:05d}"
        self._restored: Snapshot = {}  # files of other nodes as they were fetched
        self._stored: Snapshot = {}
        self._previous: Snapshot | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-folder", daemon=True)
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, origins: Sequence[str] = ()) -> bool:
        """Fetch what an earlier attempt has stored; else that of the first of ``origins`` that has any.

        Raises UserError if the disk is too small, DamagedError for a damaged file.
        """
        for prefix in (self._prefix, *origins):
            manifests = [key for key in self._storage.keys(prefix) if key.endswith(f"/{MANIFEST}")]
            keys = [key.rpartition("/")[0] for key in manifests]
            for key in keys:
                fetched = fetch_files(self._storage, key, self.folder)
                if key != self._key:
                    files = self._snapshot()
                    self._restored |= {file.name: files[file.name] for file in fetched.files}
            if keys:
                self._stored = self._own(self._snapshot())
                return True
        return False

    def start(self) -> None:
        """Store the folder whenever it has changed and come to rest."""
        self._thread.start()

    def stop(self, *, complete: bool) -> None:
        """Store the last state and stop; ``complete``: the script ended well, so every file is complete."""
        self._ending.set()
        self._thread.join()
        self.poll(complete=complete)

    def poll(self, *, complete: bool = False) -> bool:
        """Store the folder if it has changed, and not since the last poll; return whether it was stored."""
        snapshot = self._own(self._snapshot())
        unchanged = complete or snapshot == self._previous
        self._previous = snapshot
        if snapshot == self._stored or not unchanged:
            return False
        stored = put_bundle(self._storage, self._key, self.folder, include=snapshot.__contains__)
        self._stored = snapshot
        current_keys = {f"{self._key}/{MANIFEST}", *(f"{self._key}/{file.key}" for file in stored.files)}
        self._storage.delete([key for key in self._storage.keys(self._key) if key not in current_keys])
        return True

    def _snapshot(self) -> Snapshot:
        files: Snapshot = {}
        for path in self.folder.rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # the script has replaced it
                continue
            if path.is_file():
                files[path.relative_to(self.folder).as_posix()] = (status.st_size, status.st_mtime_ns)
        return files

    def _own(self, files: Snapshot) -> Snapshot:
        """Leave out other nodes' files that have not changed."""
        return {name: status for name, status in files.items() if self._restored.get(name) != status}

    def _run(self) -> None:
        while not self._ending.wait(POLL_S):
            try:
                self.poll()
            except OSError as error:  # noqa: PERF203 - a file that the script removed meanwhile; the next poll tries again
                _log.info("The checkpoint folder was not stored this time: %s", error)
