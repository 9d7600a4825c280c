"""Bundles: folders stored as one unit, either complete or absent.

The files are stored first, each under a key made of its hash and name, then ``manifest.json``. So an
interrupted upload can be continued, an incomplete bundle is never mistaken for a complete one, and a damaged
file is detected when it is fetched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.untrusted import DeepError, list_contained_files, parse_json
from launchers.base.workdir import is_disk_full

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 * 2**20
_MAX_NAME_BYTES = 255  # limit of a file's or folder's name on Linux's file systems
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedError(UserError):
    """Error for a stored file whose content has changed since it was stored."""


class Storage(Protocol):
    """A store of files under keys like ``a/b/c``. Every write is atomic.

    A key is never overwritten with other content, except by :meth:`put_bytes`.
    """

    def put_file(self, key: str, path: Path) -> None:
        """Copy a local file into the store; may take long, may be called from several threads."""

    def get_file(self, key: str, path: Path) -> None:
        """Copy to a local file in an existing folder. Raises FileNotFoundError for a missing key."""

    def put_bytes(self, key: str, data: bytes) -> None:
        """Write a small value, replacing an older one."""

    def get_bytes(self, key: str) -> bytes:
        """Read a small value, never an outdated one. Raises FileNotFoundError for a missing key."""

    def size(self, key: str) -> int | None:
        """Return the value's size in bytes; None for a missing key."""

    def keys(self, prefix: str) -> list[str]:
        """List all keys below the folder ``prefix`` (any depth), as passed to ``put_*``, sorted."""

    def delete(self, keys: Iterable[str]) -> bool:
        """Delete these keys, ignoring missing ones. Returns False if the store does not support deletion."""

    def describe(self, key: str) -> str:
        """Return the location of a key for messages: a path or an address."""


class LocalStorage:
    """Storage in a local (or shared) folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"storage key {key!r}: must be names joined by single slashes")
        return self.root.joinpath(*parts)

    def put_file(self, key: str, path: Path) -> None:
        self._put(key, lambda temporary: shutil.copyfile(path, temporary))

    def put_bytes(self, key: str, data: bytes) -> None:
        self._put(key, lambda temporary: temporary.write_bytes(data))

    def _put(self, key: str, write: Callable[[Path], object]) -> None:
        """Let ``write`` write a temporary file, and publish it under the key once it is on the disk."""
        destination = self._path(key)
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)

    def get_file(self, key: str, path: Path) -> None:
        shutil.copyfile(self._path(key), path)

    def get_bytes(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def size(self, key: str) -> int | None:
        try:
            return self._path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def keys(self, prefix: str) -> list[str]:
        keys: list[str] = []
        for folder, _, names in os.walk(self._path(prefix)):
            relative = Path(folder).relative_to(self.root).as_posix()
            keys += [f"{relative}/{name}" for name in names if not name.endswith(".tmp")]
        return sorted(keys)

    def delete(self, keys: Iterable[str]) -> bool:
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            for parent in path.parents:  # leave no empty folders behind
                if parent == self.root:
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break
        return True

    def describe(self, key: str) -> str:
        return str(self._path(key))


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFile:
    """One file of a bundle."""

    name: str  # path inside the folder, with slashes
    size: int  # bytes
    sha256: str  # 64 hexadecimal digits

    def __post_init__(self) -> None:
        """Raise ValueError with a reason for values that :func:`put_bundle` never writes into a manifest."""
        if not isinstance(self.name, str) or not _is_inside_folder(self.name):
            raise ValueError(f"its file name {self.name!r} is not a path inside a folder")
        if type(self.size) is not int or self.size < 0:
            raise ValueError(f"the size of {self.name!r} is {self.size!r}")
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"the SHA-256 of {self.name!r} is {self.sha256!r}")

    @property
    def key(self) -> str:
        """Key of the file below the bundle's key; different contents never share a key."""
        return f"{self.sha256[:16]}-{self.name.rpartition('/')[2]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """List of a bundle's files."""

    files: tuple[BundleFile, ...]

    def __post_init__(self) -> None:
        """Raise ValueError with a reason if two files would have the same path."""
        names = [file.name for file in self.files]
        folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
        for name, times in Counter(names).items():
            if times > 1 or name in folders:
                raise ValueError(f"its file name {name!r} is used twice")

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        return cls(files=tuple(BundleFile(**file) for file in parse_json(data)["files"]))


def _is_inside_folder(name: str) -> bool:
    """Whether this is a plain relative path that cannot escape a folder."""
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    return b"\0" not in b"".join(parts) and all(
        part not in (b"", b".", b"..") and len(part) <= _MAX_NAME_BYTES for part in parts
    )


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class ChangedError(OSError):
    """A file was written to while it was stored."""


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def put_bundle(
    storage: Storage, key: str, folder: Path, include: Callable[[str], bool] = lambda _: True
) -> Manifest:
    """Store all files of ``folder`` under ``key``; files that an earlier try has stored are not sent again.

    Only files whose name ``include`` accepts are stored. Raises UserError for a link that leads out of the
    folder, and if the store is full, after deleting the files that this call stored; ChangedError if a file
    changed meanwhile.
    """
    files = {path.relative_to(folder).as_posix(): path for path in list_contained_files(folder)}
    return put_files(storage, key, {name: path for name, path in files.items() if include(name)})


def put_files(storage: Storage, key: str, files: Mapping[str, Path]) -> Manifest:
    """Store files under these names as a bundle; see :func:`put_bundle`."""
    states_before = {name: _state(path) for name, path in files.items()}
    try:
        manifest = Manifest(
            files=tuple(
                BundleFile(name=name, size=path.stat().st_size, sha256=sha256_of(path))
                for name, path in sorted(files.items())
            )
        )
    except ValueError as reason:
        raise UserError(f"{storage.describe(key)} cannot be stored: {reason}.", "Rename the file.") from None
    sent: list[str] = []
    try:
        for file in manifest.files:
            file_key = f"{key}/{file.key}"
            if storage.size(file_key) == file.size:
                _log.debug("Not uploaded, already stored: %s", file_key)
            else:
                _log.debug("Upload %s (%d bytes)", file_key, file.size)
                sent.append(file_key)
                storage.put_file(file_key, files[file.name])
        changed = next((path for name, path in files.items() if _state(path) != states_before[name]), None)
        if changed is not None:
            raise ChangedError(f"{changed} was changed while it was stored")
        storage.put_bytes(f"{key}/{MANIFEST}", manifest.to_json())
    except OSError as error:
        if not is_disk_full(error):
            raise
        storage.delete(sent)
        raise UserError(
            f"No space left for {storage.describe(key)}: "
            f"{len(manifest.files)} files take {format_bytes(manifest.total_bytes)}.",
            "Free some space there, or move the datastore.",
        ) from error
    _log.info(
        "Stored %s: %d files, %d bytes, %d of them uploaded",
        storage.describe(key),
        len(manifest.files),
        manifest.total_bytes,
        len(sent),
    )
    return manifest


def read_manifest(storage: Storage, key: str) -> Manifest | None:
    """Return the bundle's manifest; None if it is missing or invalid."""
    try:
        return _manifest(storage, key)
    except (FileNotFoundError, DamagedError):
        return None


def _manifest(storage: Storage, key: str) -> Manifest:
    data = storage.get_bytes(f"{key}/{MANIFEST}")
    try:
        return Manifest.from_json(data)
    except (LookupError, TypeError, DeepError, UnicodeDecodeError, json.JSONDecodeError):
        raise _damaged(storage, key, MANIFEST, "it is not a list of files") from None
    except ValueError as error:
        raise _damaged(storage, key, MANIFEST, str(error)) from None


def has_bundle(storage: Storage, key: str) -> bool:
    """Whether the bundle exists with all files in the right sizes (contents are not read)."""
    manifest = read_manifest(storage, key)
    return manifest is not None and all(
        storage.size(f"{key}/{file.key}") == file.size for file in manifest.files
    )


def get_bundle(storage: Storage, key: str, folder: Path) -> Manifest:
    """Fetch a bundle into ``folder``, which is replaced; on failure nothing is left there.

    Raises DamagedError for a missing or damaged file, UserError if there is no such bundle or the disk is too
    small.
    """
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        manifest = fetch_files(storage, key, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def fetch_files(
    storage: Storage, key: str, folder: Path, include: Callable[[str], bool] = lambda _: True
) -> Manifest:
    """Fetch a bundle's files into ``folder``, each verified by size and SHA-256; other files there are kept.

    Only files whose name ``include`` accepts are fetched and listed in the returned manifest. Raises
    UserError, before anything is written, for a manifest or a symbolic link in ``folder`` that would place a
    file elsewhere.
    """
    try:
        manifest = _manifest(storage, key)
    except FileNotFoundError:
        raise UserError(
            f"There is no complete bundle at {storage.describe(key)}: its {MANIFEST} is missing."
        ) from None
    manifest = Manifest(files=tuple(file for file in manifest.files if include(file.name)))
    _refuse_links(folder, manifest)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if manifest.total_bytes > free:
        raise _too_small(folder, manifest, free)
    for file in manifest.files:
        destination = folder / file.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        _log.debug("Download %s/%s (%d bytes)", key, file.key, file.size)
        try:
            storage.get_file(f"{key}/{file.key}", destination)
        except FileNotFoundError:
            raise _damaged(storage, key, file.name, "it is missing") from None
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise _too_small(folder, manifest, shutil.disk_usage(folder).free) from error
        size = destination.stat().st_size
        if size != file.size:
            raise _damaged(storage, key, file.name, f"it has {size} bytes instead of {file.size}")
        if sha256_of(destination) != file.sha256:
            raise _damaged(storage, key, file.name, "its SHA-256 differs")
    _log.info(
        "Fetched %s: %d files, %d bytes", storage.describe(key), len(manifest.files), manifest.total_bytes
    )
    return manifest


def _refuse_links(folder: Path, manifest: Manifest) -> None:
    """Raise UserError if a file would be written through a symbolic link in the folder."""
    names = [PurePosixPath(file.name) for file in manifest.files]
    paths = {folder / path for name in names for path in (name, *name.parents[:-1])}
    for path in sorted(paths):
        if path.is_symlink():
            raise UserError(
                f"{path} is a symbolic link: files fetched into {folder} would be written elsewhere.",
                "Remove it, or choose another folder.",
            )


def _damaged(storage: Storage, key: str, name: str, problem: str) -> DamagedError:
    return DamagedError(
        f"{name} of {storage.describe(key)} is damaged: {problem}.",
        "Remove that folder, so that it is recreated or an older one is used.",
    )


def _too_small(folder: Path, manifest: Manifest, free: int) -> UserError:
    return UserError(
        f"No space left in {folder.parent}: {format_bytes(manifest.total_bytes)} are needed, "
        f"{format_bytes(free)} are free.",
        "Free some space there, or request a larger disk.",
    )
