"""SyncedFolder: a folder of one node that is kept in the store while a script writes to it.

Each entry of the folder (a file, or a folder with everything below it) is one bundle, stored once none of its
files has changed between two polls: a log that is always written to delays no checkpoint. A script that is
killed while it writes leaves the state before that in the store. Each node keeps separate bundles; a restored
folder has the files of all nodes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from launchers.store.bundles import MANIFEST, ChangedError, Storage, fetch_files, put_bundle

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
        self._storage, self._prefix, self._node = storage, prefix, f"node-{node:05d}"
        self._restored: Snapshot = {}  # files of other nodes as they were fetched
        self._stored: dict[str, Snapshot] = {}  # by entry
        self._previous: dict[str, Snapshot] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-folder", daemon=True)
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, origins: Sequence[str] = ()) -> bool:
        """Fetch the files of an earlier attempt, or else of the first of ``origins`` that stored any.

        Raises UserError if the disk is too small, DamagedError for a damaged file.
        """
        for prefix in (self._prefix, *origins):
            manifests = [key for key in self._storage.keys(prefix) if key.endswith(f"/{MANIFEST}")]
            for key in (key.rpartition("/")[0] for key in manifests):
                fetched = fetch_files(self._storage, key, self.folder)
                if not key.startswith(f"{prefix}/{self._node}/"):
                    files = self._snapshot()
                    self._restored |= {file.name: files[file.name] for file in fetched.files}
            if manifests:
                if prefix == self._prefix:
                    self._stored = self._own_entries()
                return True
        return False

    def start(self) -> None:
        """Store each entry of the folder once it has changed and is no longer being written."""
        self._thread.start()

    def stop(self, *, complete: bool) -> None:
        """Store the last state and stop; ``complete``: the script ended well, so every file is complete."""
        self._ending.set()
        self._thread.join()
        self.poll(complete=complete)

    def poll(self, *, complete: bool = False) -> bool:
        """Store changed entries that are unchanged since the last poll; return whether any was stored.

        Raises ChangedError, after storing the others, if an entry changed meanwhile.
        """
        entries, before = self._own_entries(), self._previous
        self._previous = entries
        problem: ChangedError | None = None
        stored = 0
        for name, files in entries.items():
            if self._stored.get(name) == files or not (complete or before.get(name) == files):
                continue
            try:
                self._store(name, files)
                stored += 1
            except ChangedError as error:
                problem = error
        # A checkpoint that the script has removed stays until the one that replaces it is stored
        if entries.keys() <= self._stored.keys():
            for name in self._stored.keys() - entries.keys():
                self._storage.delete(self._storage.keys(self._key(name)))
                del self._stored[name]
        if problem is not None:
            raise problem
        return stored > 0

    def _store(self, name: str, files: Snapshot) -> None:
        key = self._key(name)
        bundle = put_bundle(self._storage, key, self.folder, include=files.__contains__)
        self._stored[name] = files
        kept = {f"{key}/{MANIFEST}", *(f"{key}/{file.key}" for file in bundle.files)}
        self._storage.delete([each for each in self._storage.keys(key) if each not in kept])

    def _key(self, entry: str) -> str:
        """Return the key of an entry's bundle, with a hash because the name may have invalid characters."""
        return f"{self._prefix}/{self._node}/{hashlib.sha256(entry.encode()).hexdigest()[:16]}"

    def _own_entries(self) -> dict[str, Snapshot]:
        """Return the folder's entries without other nodes' files that have not changed."""
        entries: dict[str, Snapshot] = {}
        for name, status in self._snapshot().items():
            if self._restored.get(name) != status:
                entries.setdefault(name.partition("/")[0], {})[name] = status
        return entries

    def _snapshot(self) -> Snapshot:
        files: Snapshot = {}
        for path in self.folder.rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # the script has removed the file meanwhile
                continue
            if path.is_file():
                files[path.relative_to(self.folder).as_posix()] = (status.st_size, status.st_mtime_ns)
        return files

    def _run(self) -> None:
        while not self._ending.wait(POLL_S):
            try:
                self.poll()
            except OSError as error:  # noqa: PERF203 - a file that the script removed meanwhile; the next poll tries again
                _log.info("The checkpoint folder was not stored this time: %s", error)
