"""MetaflowStorage: the run's datastore as a :class:`launchers.store.bundles.Storage`.

Keys are relative to ``ROOT/FLOW/finetune/``, or to ``ROOT/finetune-cache/`` for data shared by all flows.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decorators import _metaflow
from decorators.s3_datastore import S3Storage
from launchers.store.bundles import LocalStorage, Storage, get_bundle


class MetaflowStorage:
    """Storage in Metaflow's datastore: local, S3, Google Cloud Storage or Azure.

    Parameters
    ----------
    implementation:
        Metaflow's DataStoreStorage.
    folder:
        Folder relative to the datastore's root.
    """

    def __init__(self, implementation: Any, folder: str) -> None:
        self.kind = str(implementation.TYPE)
        self._storage: Storage
        if self.is_local:
            self._storage = LocalStorage(Path(implementation.datastore_root) / folder)
        elif self.kind == "s3":
            self._storage = S3Storage(f"{implementation.datastore_root}/{folder}")
        else:
            self._storage = _OtherStorage(implementation, folder)

    @property
    def is_local(self) -> bool:
        """Whether the datastore is on this machine."""
        return self.kind == "local"

    def put_file(self, key: str, path: Path) -> None:
        self._storage.put_file(key, path)

    def get_file(self, key: str, path: Path) -> None:
        self._storage.get_file(key, path)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._storage.put_bytes(key, data)

    def get_bytes(self, key: str) -> bytes:
        return self._storage.get_bytes(key)

    def size(self, key: str) -> int | None:
        return self._storage.size(key)

    def keys(self, prefix: str) -> list[str]:
        return self._storage.keys(prefix)

    def delete(self, keys: Iterable[str]) -> bool:
        return self._storage.delete(keys)

    def describe(self, key: str) -> str:
        return self._storage.describe(key)


def datastore(*, shared: bool = False) -> MetaflowStorage:
    """Return the storage of the running flow, or with ``shared`` the storage common to all flows."""
    folder = "finetune-cache" if shared else f"{_metaflow.flow_name()}/finetune"
    return MetaflowStorage(_metaflow.storage(), folder)


def datastore_root() -> str:
    """Return the root of the running flow's datastore: a folder, or s3://bucket/..."""
    return str(_metaflow.storage().datastore_root)


def fetch_model(run: str, folder: Path) -> Path:
    """Fetch a finished model (``"FinetuneFlow/123"``) from the configured datastore into a folder.

    Raises UserError if there is none.
    """
    flow, _, run_id = run.rpartition("/")
    storage = MetaflowStorage(_metaflow.configured_storage(), f"{flow or 'FinetuneFlow'}/finetune")
    get_bundle(storage, f"models/{run_id}", folder)
    return folder


def origin_run_ids() -> tuple[str, ...]:
    """Return the runs that this one was resumed from, most recent first; empty for a new run."""
    store = datastore()
    run_ids: list[str] = []
    run_id = _metaflow.origin_run_id()
    while run_id is not None and run_id not in run_ids:
        run_ids.append(run_id)
        try:
            run_id = store.get_bytes(_origin_key(run_id)).decode()
        except FileNotFoundError:
            break
    return tuple(run_ids)


def remember_origin() -> None:
    """Record which run this one was resumed from, for later resumes of it."""
    origin = _metaflow.origin_run_id()
    if origin is not None:
        datastore().put_bytes(_origin_key(_metaflow.run_id()), origin.encode())


def _origin_key(run_id: str) -> str:
    return f"runs/{run_id}/origin"


class _OtherStorage:
    """Storage through Metaflow's interface, which cannot delete and reads values as files."""

    _warned = False

    def __init__(self, implementation: Any, folder: str) -> None:
        self._storage = implementation
        self._folder = folder

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            self._storage.save_bytes([(self._path(key), file)], overwrite=True)

    def get_file(self, key: str, path: Path) -> None:
        with self._storage.load_bytes([self._path(key)]) as loaded:
            for _, local, _ in loaded:
                if local is None:
                    raise FileNotFoundError(self.describe(key))
                shutil.copyfile(local, path)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._storage.save_bytes([(self._path(key), io.BytesIO(data))], overwrite=True)

    def get_bytes(self, key: str) -> bytes:
        with self._storage.load_bytes([self._path(key)]) as loaded:
            for _, local, _ in loaded:
                if local is not None:
                    return Path(local).read_bytes()
        raise FileNotFoundError(self.describe(key))

    def size(self, key: str) -> int | None:
        if not self._storage.is_file([self._path(key)])[0]:
            return None
        size = self._storage.size_file(self._path(key))
        return None if size is None else int(size)

    def keys(self, prefix: str) -> list[str]:
        names: list[str] = []
        folders = [self._path(prefix)]
        while folders:
            for path, is_file in self._storage.list_content([folders.pop()]):
                if is_file:
                    names.append(path[len(self._folder) + 1 :])
                else:
                    folders.append(path)
        return sorted(names)

    def delete(self, keys: Iterable[str]) -> bool:
        if list(keys) and not _OtherStorage._warned:
            _OtherStorage._warned = True
            _metaflow.print_line(
                f"Metaflow cannot delete files from a {self._storage.TYPE} datastore: "
                f"old checkpoints are kept in {self.describe('')}"
            )
        return False

    def describe(self, key: str) -> str:
        return str(self._storage.full_uri(self._path(key)))
