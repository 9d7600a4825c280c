"""Phase 2, disks and stores: write and sync a file, then read it back bypassing the page cache.

The datastore is a folder or ``s3://bucket/prefix``. Written data is removed, also after a failure;
:func:`remove` cleans up after a rank that hung and was restarted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from checklist.analysis.busbw import algbw
from checklist.measurements import NO_FOLDER
from checklist.probing.context import Context

BLOCK = 8 << 20  # large enough for a single reader to saturate a disk
_MEMORY = ("tmpfs", "ramfs")
MAX_FILES = 2000
FILES_S = 2.0  # maximum duration
_NETWORK_S = {"connect_timeout": 5, "read_timeout": 30}  # seconds, of each request to an object store
_ATTEMPTS = 3
_ENDPOINT = "METAFLOW_S3_ENDPOINT_URL"  # as Metaflow names it; boto3 itself reads AWS_ENDPOINT_URL

Sampled = tuple[list[float], str | None]  # GB/s, and a note on the method
Figure = Callable[[str, Callable[[], Sampled]], None]


class StorageTarget(Protocol):
    """Storage location that can write, read back and remove one object. Failures are OSErrors."""

    def write(self, size: int) -> Sampled: ...

    def read(self) -> Sampled: ...

    def remove(self) -> None:
        """Remove the object if it exists; ignore failures."""


def measure(record: Figure, name: str, directory: str | None, datastore: str | None, size: int) -> None:
    """Write and read ``size`` bytes as ``name`` in each given location."""
    for kind, target in _targets(name, directory, datastore).items():
        samples: list[Sampled] = []

        def write(target: StorageTarget = target, samples: list[Sampled] = samples) -> Sampled:
            samples.append(target.write(size))
            return samples[0]

        try:
            record(f"{kind}_write", write)
            if samples:
                record(f"{kind}_read", target.read)
                if kind == "storage":
                    record("storage_files", partial(files, Path(directory or ".") / f"{name}.files"))
        finally:
            target.remove()


def files(folder: Path) -> Sampled:
    """Measure small files per second: create, stat and remove them sequentially, like a loader of many files.

    This is a file system's metadata rate (the operations of IOR's mdtest) for one client with a cache.
    """
    folder.mkdir()
    names = [folder / f"{number:05d}" for number in range(MAX_FILES)]
    note, count, deadline = _memory(folder), 0, time.perf_counter() + FILES_S
    start = time.perf_counter()
    try:
        for name in names:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            name.stat()
            name.unlink()
            count += 1
            if time.perf_counter() > deadline:
                break
        return [count / (time.perf_counter() - start)], note
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove(_: Context, name: str, directory: str | None, datastore: str | None) -> None:
    """Remove files left in these locations by a killed process."""
    for target in _targets(name, directory, datastore).values():
        target.remove()
    if directory is not None:
        shutil.rmtree(Path(directory) / f"{name}.files", ignore_errors=True)


def _targets(name: str, directory: str | None, datastore: str | None) -> dict[str, StorageTarget]:
    targets: dict[str, StorageTarget] = {}
    if directory is not None:
        targets["storage"] = File(Path(directory) / name)
    if datastore is not None:
        targets["datastore"] = (
            Object(datastore, name) if datastore.startswith("s3://") else File(Path(datastore) / name)
        )
    return targets


class File:
    """A file on a local or remote file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, size: int) -> Sampled:
        """Write and sync the file; return GB/s."""
        if not self._path.parent.is_dir():
            raise OSError(f"{NO_FOLDER} {self._path.parent}")
        block = os.urandom(1 << 20)  # incompressible
        start = time.perf_counter()
        with self._path.open("wb") as file:
            for _ in range(max(1, size >> 20)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        return [algbw(self._path.stat().st_size, seconds)], _memory(self._path.parent)

    def read(self) -> Sampled:
        """Read from disk if possible and return GB/s, with a note if the data may have come from memory."""
        note, size, total = _memory(self._path.parent), self._path.stat().st_size, 0
        with _uncached(self._path) as (file, direct):
            start = time.perf_counter()
            buffer = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT requires
            while read_bytes := os.readv(file, [buffer]):
                total += read_bytes
            seconds = time.perf_counter() - start
        if total != size:
            raise OSError(f"{total} of {size} bytes came back")
        if note is None and not direct:
            note = "the page cache was asked to drop the file, but could not be bypassed"
        return [algbw(total, seconds)], note

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # a failed write was already reported
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _uncached(path: Path) -> Iterator[tuple[int, bool]]:
    """Open the file after evicting it from the page cache; also return whether reads bypass the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    direct = True
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # not supported by some file systems
        file, direct = os.open(path, os.O_RDONLY), False
    try:
        yield file, direct
    finally:
        os.close(file)


def _memory(directory: Path) -> str | None:
    """Return a note if the file system is in memory; None if it is not or is unknown."""
    real_path = os.path.realpath(directory)
    best, file_system = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, mounted, kind = line.split()[:3]
        mounted = mounted.replace("\\040", " ")
        contained = real_path == mounted or real_path.startswith(mounted.rstrip("/") + "/")
        if contained and len(mounted) >= len(best):  # a later mount on the same path hides earlier ones
            best, file_system = mounted, kind
    return f"{best} is {file_system}: memory, not a disk" if file_system in _MEMORY else None


class Object:
    """An object in an S3-compatible store."""

    def __init__(self, url: str, name: str) -> None:
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._key = "/".join(filter(None, (prefix.strip("/"), name)))

    def write(self, size: int) -> Sampled:
        """Upload concurrent parts, like large artifacts; return GB/s."""
        start = time.perf_counter()
        with _errors_as_oserror():
            self._client.upload_fileobj(_Random(size), self._bucket, self._key)
        return [algbw(size, time.perf_counter() - start)], None

    def read(self) -> Sampled:
        """Download concurrent parts and discard them; return GB/s."""
        sink = _Sink()
        start = time.perf_counter()
        with _errors_as_oserror():
            self._client.download_fileobj(self._bucket, self._key, sink)
        return [algbw(sink.size, time.perf_counter() - start)], None

    def remove(self) -> None:
        with contextlib.suppress(OSError), _errors_as_oserror():
            self._client.delete_object(Bucket=self._bucket, Key=self._key)

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=os.environ.get(_ENDPOINT) or None,
            config=Config(retries={"max_attempts": _ATTEMPTS}, **_NETWORK_S),
        )


class _Random:
    """A file-like source that repeats one block of random bytes."""

    def __init__(self, size: int) -> None:
        self._block, self._left = os.urandom(1 << 20), size

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        self._left -= size
        return (self._block * (size // len(self._block) + 1))[:size]


class _Sink:
    """A file-like sink that counts the bytes written."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        return len(data)


@contextlib.contextmanager
def _errors_as_oserror() -> Iterator[None]:
    """Convert boto3's errors to OSErrors, which figures report as failures."""
    try:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise OSError("S3 takes boto3: pip install boto3") from None
    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError, ValueError) as error:  # ValueError: a bad endpoint
        raise OSError(" ".join(str(error).split())) from None
