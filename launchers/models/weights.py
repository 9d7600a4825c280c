"""Where a model comes from, what shape it has, and its files: fetched once, checked before use.

Sources: tiny-llama (made here), the model table, the Hugging Face Hub, a local directory, S3.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from estimator import models, remote
from estimator.errors import UserError
from estimator.models import ModelSpec, hf_config
from estimator.plan import GIB
from launchers.models.files import NOT_PATTERNS, PATTERNS, check_complete, is_wanted, read_config
from launchers.workdir import full_disk_explained

TINY = "tiny-llama"
Kind = Literal["tiny", "table", "hub", "local", "s3"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
GO_ON = "Free some space and run again: what is whole is not fetched again."
FETCH_LIMIT_S = 4 * 3600.0  # that another process may take which fetches the same model


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRef:
    """A model and where it is: a table name, a hub id, a folder or an s3:// URL in ``location``."""

    kind: Kind
    name: str  # as the user gave it
    location: str


def resolve(model: str) -> ModelRef:
    """What ``--model`` names. Looks at the table and the local disk only.

    A name of the table wins over a folder of that name (write ``./name`` for the folder); a folder that is
    there wins over a hub id. Raises UserError for a missing folder or an unknown name.
    """
    if model == TINY:
        return ModelRef(kind="tiny", name=model, location="")
    if model.startswith("s3://"):
        remote.s3_location(model)
        return ModelRef(kind="s3", name=model, location=model.rstrip("/"))
    path = Path(model).expanduser()
    if path.is_absolute() or model.startswith((".", "~")):
        if not path.is_dir():
            raise UserError(f"There is no model directory {path}.", "Give a folder with config.json in it.")
        return ModelRef(kind="local", name=model, location=str(path.resolve()))
    if "/" not in model and not path.is_dir():
        return _of_table(model, models.find(model))
    if model in models.names():
        return _of_table(model, models.find(model))
    if path.is_dir():
        return ModelRef(kind="local", name=model, location=str(path.resolve()))
    if _HUB_ID.fullmatch(model):
        return ModelRef(kind="hub", name=model, location=model)
    raise UserError(f"There is no model directory {model}.", "finetune models shows the known names.")


def spec_of(ref: ModelRef) -> ModelSpec:
    """The model's shape. No weights are downloaded; for a hub id or S3 its config.json is."""
    if ref.kind in ("tiny", "table"):
        return models.find(ref.name)
    if ref.kind == "local":
        return hf_config.to_spec(read_config(Path(ref.location)), ref.name)
    if ref.kind == "s3":
        return hf_config.to_spec(_s3_config(ref.location), ref.name)
    if models.known(ref.location):  # no network needed; refuses what is no language model
        return models.find(ref.location)
    return hf_config.to_spec(_hub_config(ref.location), ref.name)


def fetch(ref: ModelRef, folder: Path) -> Path:
    """The model's files, whole: a local directory in place, any other in ``folder`` (or the hub's cache).

    Files that are there already are not fetched again, so a download that was cut goes on with the file at
    which it stopped. Of several processes that fetch into one folder, one downloads and the others wait.
    Raises UserError where the model can't be had, where the disk is too small (before anything is
    downloaded), or where files are broken.
    """
    if ref.kind == "tiny":
        from launchers.models import tiny_llama  # needs numpy, which planning does without

        return tiny_llama.make(folder)
    if ref.kind == "local":
        path = Path(ref.location)
    else:
        with _alone(folder):
            path = (_fetch_s3 if ref.kind == "s3" else _fetch_hub)(ref.location, folder)
    check_complete(path)
    return path


def _check_space(folder: Path, needed_bytes: int, name: str) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise UserError(
            f"{name} needs {needed_bytes / GIB:.1f} GiB, {folder} has {free / GIB:.1f} GiB free.",
            "Free some space, or choose another folder.",
        )


# The Hugging Face Hub


def _of_table(name: str, spec: ModelSpec) -> ModelRef:
    if spec.name == TINY or spec.hf_id is None:
        return ModelRef(kind="tiny", name=spec.name, location="")
    return ModelRef(kind="table", name=name, location=spec.hf_id)


def _hub_config(repo_id: str) -> dict[str, Any]:
    huggingface_hub = remote.hub()

    cached = huggingface_hub.try_to_load_from_cache(repo_id, "config.json")
    if not isinstance(cached, str):
        with remote.hub_errors("model", repo_id):
            # Asked first because it fails at once without a network; the download would retry for 20 s.
            huggingface_hub.model_info(repo_id, token=remote.hub_token())
            cached = huggingface_hub.hf_hub_download(repo_id, "config.json", token=remote.hub_token())
    return read_config(Path(cached).parent)


def _fetch_hub(repo_id: str, folder: Path) -> Path:
    huggingface_hub = remote.hub()

    if _is_complete(folder):
        return folder
    cached = _cached(repo_id)
    if cached is not None:
        return cached
    with remote.hub_errors("model", repo_id):
        info = huggingface_hub.model_info(repo_id, files_metadata=True, token=remote.hub_token())
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or [] if is_wanted(s.rfilename)}
        if not any(name.endswith(".safetensors") for name in sizes):
            raise UserError(f"Model {repo_id} has no *.safetensors on the Hugging Face Hub.")
        _remove_unfinished(folder)
        missing = sum(size for file, size in sizes.items() if not _has_size(folder / file, size))
        _check_space(folder, missing, f"Model {repo_id}")
        with full_disk_explained(folder, GO_ON):
            path = huggingface_hub.snapshot_download(
                repo_id,
                revision=info.sha,
                local_dir=folder,
                token=remote.hub_token(),
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(NOT_PATTERNS),
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
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(NOT_PATTERNS),
        )
    except LocalEntryNotFoundError:
        return None
    return Path(path) if _is_complete(Path(path)) else None


def _is_complete(folder: Path) -> bool:
    try:
        check_complete(folder)
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
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Another process has been fetching into {folder} for {FETCH_LIMIT_S / 3600:g} hours.",
                    "End it and run again: it goes on where that one stopped.",
                ) from None
        except OSError:  # a file system without locks: nobody can be waited for
            return
        else:
            return
        if not told:
            print(f"waiting for another process that fetches into {folder}", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.5)


# S3


def _fetch_s3(url: str, folder: Path) -> Path:
    bucket, prefix = remote.s3_location(url)
    client = remote.s3_client()
    with remote.s3_errors(url):
        sizes = {
            key: size
            for key, size in _s3_list(client, bucket, prefix.rstrip("/") + "/")
            if is_wanted(Path(key).name) and "/" not in key[len(prefix.rstrip("/")) + 1 :]
        }
        if not sizes:
            raise UserError(f"{url}: there is no model.", "Look with: aws s3 ls")
        missing = {k: s for k, s in sizes.items() if not _has_size(folder / Path(k).name, s)}
        _check_space(folder, sum(missing.values()), url)
        with full_disk_explained(folder, GO_ON):
            for key in missing:
                remote.s3_download(client, bucket, key, folder / Path(key).name)
    return folder


def _s3_list(client: Any, bucket: str, prefix: str) -> Iterable[tuple[str, int]]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return ((entry["Key"], entry["Size"]) for page in pages for entry in page.get("Contents", ()))


def _s3_config(url: str) -> dict[str, Any]:
    bucket, prefix = remote.s3_location(url + "/config.json")
    with remote.s3_errors(url + "/config.json"):
        body = remote.s3_client().get_object(Bucket=bucket, Key=prefix)["Body"].read()
    try:
        config = json.loads(body)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{url}/config.json is not a JSON object.")
    return config
