"""A model's files: made here, or fetched once from the Hugging Face Hub or S3, and checked before use."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from estimator import remote
from estimator.errors import UserError
from estimator.formatting import format_bytes, format_duration
from estimator.models import ModelSource
from launchers.models import pickled, pipelines
from launchers.models.files import (
    NOT_PATTERNS,
    PATTERNS,
    PICKLED_PATTERNS,
    check_complete,
    is_wanted,
    patterns_for,
    pickled_files,
)
from launchers.workdir import full_disk_explained

_log = logging.getLogger(__name__)

TINY = "tiny-llama"
GENERATED_VERSION = 2  # raised whenever tiny-llama or tiny-sdxl of the same seed gets other bytes
GO_ON = "Free some space and run again: what is whole is not fetched again."
FETCH_LIMIT_S = 4 * 3600.0  # that another process may take which fetches the same model


def fetch(model: ModelSource, folder: Path) -> Path:
    """The model's files, whole, as safetensors: a local directory in place, any other in ``folder`` (or the
    hub's cache).

    Files that are there already are not fetched again, so a download that was cut goes on with the file at
    which it stopped. A model that only has ``pytorch_model*.bin`` is converted once, into ``folder`` or a
    folder beside it: a user's directory and the hub's cache are never written to. Of several processes that
    fetch into one folder, one works and the others wait. Raises UserError where the model can't be had, where
    the disk is too small (before anything is downloaded), or where files are broken.
    """
    if model.kind == "made":
        _log.debug("Weights of %s are generated in %s", model.name, folder)
        from launchers.models import tiny_llama, tiny_sdxl  # need numpy, which planning does without

        return tiny_sdxl.make(folder) if model.name == tiny_sdxl.NAME else tiny_llama.make(folder)
    if model.kind == "folder":
        path = Path(model.location)
        _log.debug("Weights of %s are read from %s", model.name, path)
        check_whole(path)
        if (path / pipelines.INDEX).is_file() or not pickled_files(path):
            return path
        name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
        folder = folder.with_name(f"{folder.name}-{name}")  # another directory may have the same name
        with _alone(folder):
            return _converted(path, folder)
    with _alone(folder):
        _log.info("Fetching weights of %s from %s %s", model.name, model.kind, model.location)
        path = (_fetch_s3 if model.kind == "s3" else _fetch_hub)(model.location, folder)
        _log.info("Weights of %s are in %s", model.name, path)
        check_whole(path)
        if (path / pipelines.INDEX).is_file() or not pickled_files(path):
            return path
        return _converted(path, folder)


def check_whole(path: Path) -> None:
    """Raise UserError unless a model's folder, or a pipeline's, has all that belongs to it."""
    if (path / pipelines.INDEX).is_file():
        pipelines.check_whole(path)
    else:
        check_complete(path)


def _wanted(names: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a model that has files of these names: which to take, and which of those not."""
    if pipelines.is_pipeline(names):
        return pipelines.PATTERNS, pipelines.NOT_PATTERNS
    return patterns_for(names), NOT_PATTERNS


def _converted(path: Path, folder: Path) -> Path:
    """``folder`` with the safetensors of a model that has PyTorch's own files; a download of them goes."""
    if not pickled.is_made_of(path, folder):
        needed = sum(file.stat().st_size for file in pickled_files(path))
        _check_space(folder, needed, f"{path} as safetensors")
        with full_disk_explained(folder, GO_ON):
            pickled.convert(path, folder)
    if path == _unconverted(folder):
        shutil.rmtree(path, ignore_errors=True)
    return folder


def _unconverted(folder: Path) -> Path:
    """Where PyTorch's own files are fetched to, when ``folder`` is to have the model."""
    return folder.with_name(f"{folder.name}-bin")


def _check_space(folder: Path, needed_bytes: int, name: str) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise UserError(
            f"{name} needs {format_bytes(needed_bytes)}, {folder} has {format_bytes(free)} free.",
            "Free some space, or choose another folder.",
        )


# The Hugging Face Hub


def _fetch_hub(repo_id: str, folder: Path) -> Path:
    huggingface_hub = remote.hub()

    if _is_complete(folder):
        return folder
    cached = _cached(repo_id)
    if cached is not None:
        return cached
    with remote.hub_errors("model", repo_id):
        info = huggingface_hub.model_info(repo_id, files_metadata=True, token=remote.hub_token())
        files = {s.rfilename: s.size or 0 for s in info.siblings or []}
        patterns, but_for = _wanted(files)
        sizes = {name: size for name, size in files.items() if is_wanted(name, patterns, but_for)}
        if not any(name.endswith((".safetensors", ".bin")) for name in sizes):
            raise UserError(
                f"Model {repo_id} has neither *.safetensors nor pytorch_model*.bin on the Hugging Face Hub.",
                f"See https://huggingface.co/{repo_id}/tree/main",
            )
        if patterns == PATTERNS + PICKLED_PATTERNS:
            folder = _unconverted(folder)
        _remove_unfinished(folder)
        missing = sum(size for file, size in sizes.items() if not _has_size(folder / file, size))
        _check_space(folder, missing, f"Model {repo_id}")
        with full_disk_explained(folder, GO_ON):
            path = huggingface_hub.snapshot_download(
                repo_id,
                revision=info.sha,
                local_dir=folder,
                token=remote.hub_token(),
                allow_patterns=list(patterns),
                ignore_patterns=list(but_for),
            )
    return Path(path)


def _cached(repo_id: str) -> Path | None:
    """The model in the hub's own cache, where all of it is there."""
    huggingface_hub = remote.hub()
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = huggingface_hub.snapshot_download(
            repo_id,
            local_files_only=True,
            allow_patterns=list(PATTERNS + PICKLED_PATTERNS + pipelines.PATTERNS),
        )
    except LocalEntryNotFoundError:
        return None
    return Path(path) if _is_complete(Path(path)) else None


def _is_complete(folder: Path) -> bool:
    try:
        check_whole(folder)
    except UserError:
        return False
    return True


def _remove_unfinished(folder: Path) -> None:
    """Remove what a killed download has left: huggingface_hub (1.33) never uses it again nor removes it."""
    for path in (folder / ".cache" / "huggingface" / "download").glob("*.incomplete"):
        path.unlink(missing_ok=True)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock beside ``folder``; the kernel lets go of it when this process ends, however it ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        _wait_for(lock, folder)
        yield


def _wait_for(lock: IO[str], folder: Path) -> None:
    deadline = time.monotonic() + FETCH_LIMIT_S
    announced = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Another process has been fetching into {folder} for {format_duration(FETCH_LIMIT_S)}.",
                    "End it and run again: it goes on where that one stopped.",
                ) from None
        except OSError:  # a file system without locks: nobody can be waited for
            return
        else:
            return
        if not announced:
            print(f"waiting for another process that fetches into {folder}", file=sys.stderr, flush=True)
            announced = True
        time.sleep(0.5)


# S3


def _fetch_s3(url: str, folder: Path) -> Path:
    bucket, prefix = remote.s3_location(url)
    client = remote.s3_client()
    with remote.s3_errors(url):
        root = prefix.rstrip("/") + "/"
        found = {key[len(root) :]: size for key, size in _s3_list(client, bucket, root)}
        patterns, but_for = _wanted(found)
        sizes = {name: size for name, size in found.items() if is_wanted(name, patterns, but_for)}
        if not sizes:
            raise UserError(f"{url}: there is no model.", "Look with: aws s3 ls")
        if patterns == PATTERNS + PICKLED_PATTERNS:
            if pickled.has_record_of(sizes, folder):
                return folder
            folder = _unconverted(folder)
        missing = {name: size for name, size in sizes.items() if not _has_size(folder / name, size)}
        _check_space(folder, sum(missing.values()), url)
        with full_disk_explained(folder, GO_ON):
            for name in missing:
                remote.s3_download(client, bucket, root + name, folder / name)
    return folder


def _s3_list(client: Any, bucket: str, prefix: str) -> Iterable[tuple[str, int]]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return ((entry["Key"], entry["Size"]) for page in pages for entry in page.get("Contents", ()))
