"""Model files: generated, or fetched from the Hugging Face Hub or S3, and verified before use."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from estimator import remote
from estimator.errors import UserError
from estimator.formatting import format_bytes, format_duration
from estimator.models import ModelSource, hf_config
from estimator.terminal import print
from estimator.untrusted import list_contained_files
from launchers.base.workdir import full_disk_explained
from launchers.models import conversion, pickled, pipelines, published
from launchers.models.files import (
    NOT_PATTERNS,
    PATTERNS,
    PICKLED_PATTERNS,
    check_complete,
    is_model_file,
    patterns_for,
    pickled_files,
    read_config,
)

_log = logging.getLogger(__name__)

TINY = "tiny-llama"
GENERATED_VERSION = 2  # increase it if tiny-llama or tiny-sdxl change for the same seed
RETRY_ADVICE = "Free some space and run again: complete files are not fetched again."
FETCH_LIMIT_S = 4 * 3600.0  # maximum wait for another process that is fetching the same model


def fetch(model: ModelSource, folder: Path, *, vision: bool = False) -> Path:
    """Provide all files of a model as safetensors, in ``folder`` or in place; return their folder.

    A local directory, or the Hub's cache if it has the model, is used in place and never written to. Existing
    files are not fetched again, so an interrupted download continues with the file at which it stopped. A
    model that only has ``pytorch_model*.bin``, is quantized or is multimodal is converted once, to ``folder``
    or a folder next to it. If several processes fetch into one folder, one works and the others wait.

    ``vision``: keep the vision part of a multimodal model. Raises UserError if the model is unavailable, if
    the disk is too small (before any download), or if files are broken.
    """
    if vision:
        folder = folder.with_name(f"{folder.name}-vision")
    if model.kind == "made":
        _log.debug("Weights of %s are generated in %s", model.name, folder)
        from launchers.models import tiny_llama, tiny_sdxl  # need numpy, which planning does not require

        return tiny_sdxl.make(folder) if model.name == tiny_sdxl.NAME else tiny_llama.make(folder)
    if model.kind == "folder":
        path = Path(model.location)
        _log.debug("Weights of %s are read from %s", model.name, path)
        check_model_folder(path)
        if not _needs_conversion(path, vision):
            return path
        name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
        folder = folder.with_name(f"{folder.name}-{name}")  # another directory may have the same name
        with _exclusive(folder):
            return _convert(path, folder)
    with _exclusive(folder):
        _log.info("Fetching weights of %s from %s %s", model.name, model.kind, model.location)
        path = (_fetch_s3 if model.kind == "s3" else _fetch_hub)(model.location, folder)
        _log.info("Weights of %s are in %s", model.name, path)
        check_model_folder(path)
        return _convert(path, folder) if _needs_conversion(path, vision) else path


def check_model_folder(path: Path) -> None:
    """Raise UserError unless a model or pipeline is complete, without links to files outside its folder."""
    if path.is_dir():
        list_contained_files(path)
    if (path / pipelines.INDEX).is_file():
        pipelines.check_complete(path)
    else:
        check_complete(path)


def _patterns(names: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns of files to fetch and to exclude, for a model with these file names."""
    if pipelines.is_pipeline(names):
        return pipelines.PATTERNS, pipelines.NOT_PATTERNS
    return patterns_for(names), NOT_PATTERNS


def _needs_conversion(path: Path, vision: bool) -> bool:
    """Whether the files must be converted before training; raises UserError if vision prevents that."""
    if (path / pipelines.INDEX).is_file():
        return False
    if pickled_files(path):
        return True
    config = read_config(path)
    if vision and published.quantization_of(config):
        raise UserError(
            f"{path} is quantized ({published.quantization_of(config)}), and vision-language training needs "
            "weights in 16 or 32 bits.",
            "Start from the unquantized model.",
        )
    return not vision and hf_config.needs_conversion(config)


def _convert(path: Path, folder: Path) -> Path:
    """Convert a model to safetensors for training in ``folder``; delete downloaded PyTorch files."""
    pickles = pickled_files(path)
    write = pickled.write_safetensors if pickles else published.write_trainable
    if not conversion.is_converted_from(path, folder):
        if pickles:
            needed_bytes = sum(file.stat().st_size for file in pickles)
        else:
            config = read_config(path)
            needed_bytes = published.bf16_bytes(path)
            print(f"converting {path}: {published.describe(config)}, once", flush=True)
        _check_space(folder, needed_bytes, f"{path} as safetensors")
        with full_disk_explained(folder, RETRY_ADVICE):
            conversion.convert(path, folder, write)
    if path == _pickled_folder(folder):
        shutil.rmtree(path, ignore_errors=True)
    return folder


def _pickled_folder(folder: Path) -> Path:
    """Return the folder to which PyTorch files are fetched before conversion into ``folder``."""
    return folder.with_name(f"{folder.name}-bin")


def _check_space(folder: Path, needed_bytes: int, name: str) -> None:
    """Raise UserError unless ``needed_bytes`` are free on the disk of ``folder``. ``name``: for errors."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise UserError(
            f"{name} needs {format_bytes(needed_bytes)}, {folder} has {format_bytes(free)} free.",
            "Free some space, or choose another folder.",
        )


# Fetching from the Hugging Face Hub


def _fetch_hub(repo_id: str, folder: Path) -> Path:
    """Return the model's folder in the Hub's cache, or download it into ``folder``; raises UserError."""
    huggingface_hub = remote.hub()

    if _is_complete(folder):
        return folder
    cached = _cached(repo_id)
    if cached is not None:
        return cached
    with remote.hub_errors("model", repo_id):
        info = huggingface_hub.model_info(repo_id, files_metadata=True, token=remote.hub_token())
        files = {s.rfilename: s.size or 0 for s in info.siblings or []}
        patterns, excluded = _patterns(files)
        sizes = {name: size for name, size in files.items() if is_model_file(name, patterns, excluded)}
        if not any(name.endswith((".safetensors", ".bin")) for name in sizes):
            raise UserError(
                f"Model {repo_id} has neither *.safetensors nor pytorch_model*.bin on the Hugging Face Hub.",
                f"See https://huggingface.co/{repo_id}/tree/main",
            )
        if patterns == PATTERNS + PICKLED_PATTERNS:
            folder = _pickled_folder(folder)
        for path in (folder / ".cache" / "huggingface" / "download").glob("*.incomplete"):
            # Left by a killed download; huggingface_hub (1.33) does not reuse them
            path.unlink(missing_ok=True)
        missing = sum(size for file, size in sizes.items() if not _has_size(folder / file, size))
        _check_space(folder, missing, f"Model {repo_id}")
        with full_disk_explained(folder, RETRY_ADVICE):
            downloaded = huggingface_hub.snapshot_download(
                repo_id,
                revision=info.sha,
                local_dir=folder,
                token=remote.hub_token(),
                allow_patterns=list(patterns),
                ignore_patterns=list(excluded),
            )
    return Path(downloaded)


def _cached(repo_id: str) -> Path | None:
    """Return the model's folder in the Hub's cache; None unless it is complete."""
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
        check_model_folder(folder)
    except UserError:
        return False
    return True


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a file lock next to ``folder``, which the kernel releases if this process is killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        _wait_for(lock, folder)
        yield


def _wait_for(lock: IO[str], folder: Path) -> None:
    """Acquire the lock; raises UserError after FETCH_LIMIT_S."""
    deadline = time.monotonic() + FETCH_LIMIT_S
    announced = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Another process has been fetching into {folder} for {format_duration(FETCH_LIMIT_S)}.",
                    "End it and run again: the download continues where that process stopped.",
                ) from None
        except OSError:  # a file system without locks
            return
        else:
            return
        if not announced:
            print(f"waiting for another process that fetches into {folder}", file=sys.stderr, flush=True)
            announced = True
        time.sleep(0.5)


# S3


def _fetch_s3(url: str, folder: Path) -> Path:
    """Download a model from S3 into ``folder``, without files that exist already; raises UserError."""
    bucket, prefix = remote.s3_location(url)
    client = remote.s3_client()
    with remote.s3_errors(url):
        root = prefix.rstrip("/") + "/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=root)
        entries = (entry for page in pages for entry in page.get("Contents", ()))
        remote_sizes = {entry["Key"].removeprefix(root): entry["Size"] for entry in entries}
        patterns, excluded = _patterns(remote_sizes)
        sizes = {name: size for name, size in remote_sizes.items() if is_model_file(name, patterns, excluded)}
        if not sizes:
            raise UserError(f"{url}: there is no model.", "Check with: aws s3 ls")
        if conversion.has_record_of(sizes, folder):
            return folder
        if patterns == PATTERNS + PICKLED_PATTERNS:
            folder = _pickled_folder(folder)
        missing = {name: size for name, size in sizes.items() if not _has_size(folder / name, size)}
        _check_space(folder, sum(missing.values()), url)
        with full_disk_explained(folder, RETRY_ADVICE):
            for name in missing:
                remote.s3_download(client, bucket, root + name, folder / name)
    return folder
