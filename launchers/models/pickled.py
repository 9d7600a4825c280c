"""``pytorch_model*.bin``, PyTorch's pickles: read as tensors alone, and written once as safetensors."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from launchers.imports import collector_paused
from launchers.models.files import (
    PATTERNS,
    PICKLED_INDEX,
    PICKLED_PATTERNS,
    check_complete,
    is_wanted,
    pickled_files,
)
from launchers.workdir import is_caused_by_full_disk

if TYPE_CHECKING:
    import torch

_RECORD = ".converted_from.json"  # in a converted folder: the files that it was made of, and their sizes
# What torch.load raises for bytes that are no pickle, or a part of one
_BROKEN = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
# How torch names what a pickle would call: "Unsupported global: GLOBAL os.system was not an allowed global",
# "Trying to load unsupported GLOBAL posix.system whose module posix is blocked"
_CALLED = re.compile(r"GLOBAL ([\w.]+)")


def has_record_of(sizes: Mapping[str, int], folder: Path) -> bool:
    """Whether ``folder`` was made of files of these names and sizes."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == dict(sizes))


def is_made_of(source: Path, folder: Path) -> bool:
    """Whether ``folder`` was made of ``source``, whose files have not changed since."""
    paths = _sources(source)
    if not has_record_of(_sizes(paths), folder):
        return False
    made = (folder / _RECORD).stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= made for path in paths)


def convert(source: Path, folder: Path) -> None:
    """Make ``folder`` the same model with safetensors, in one step, whole; what was there is replaced.

    One file at a time is read, and of it no code is run. ``source`` is left as it is. Raises UserError for a
    pickle that holds anything but tensors, or that can't be read.
    """
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        paths = _sources(source)
        (temporary / _RECORD).write_text(json.dumps(_sizes(paths), indent=2) + "\n", encoding="utf-8")
        for path in paths:
            if is_wanted(path.name, PATTERNS) and path.name != PICKLED_INDEX:
                shutil.copyfile(path, temporary / path.name)
        _write_safetensors(pickled_files(source), temporary)
        check_complete(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sources(folder: Path) -> list[Path]:
    patterns = PATTERNS + PICKLED_PATTERNS
    return [path for path in sorted(folder.iterdir()) if path.is_file() and is_wanted(path.name, patterns)]


def _sizes(paths: list[Path]) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in paths}


def _write_safetensors(paths: list[Path], folder: Path) -> None:
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for path in paths:
        name = path.name.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"
        tensors = _without_copies(read(path))
        _save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(paths) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # which a full disk is, too
        if is_caused_by_full_disk(error, path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, mapped into memory where its format allows; UserError for any other file."""
    torch = _torch(path)
    mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        called = _CALLED.search(str(error))
        if called is None:
            raise _unreadable(path, "its pickle has operations that tensors don't need") from None
        raise UserError(
            f"{path} holds more than tensors: it would call {called[1].rstrip('.')}. It is not read, as that "
            "would run code of the file's.",
            "Take the model's *.safetensors, or save its weights alone: torch.save(model.state_dict(), ...).",
        ) from None
    except _BROKEN as error:
        raise _unreadable(path, str(error).partition("\n")[0] or type(error).__name__) from None
    if not isinstance(content, dict):
        raise _no_weights(path, f"a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise _no_weights(path, f"{name!r} as a {type(value).__name__}")
    return content


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} can't be read as a model's weights: {reason}.",
        "Delete it and fetch it again, or take the model's *.safetensors.",
    )


def _torch(path: Path) -> Any:
    try:
        with collector_paused():
            import torch
    except ImportError:
        raise UserError(
            f"{path} can't be read here: torch is not installed.", "pip install 'metaflow-finetune[train]'"
        ) from None
    return torch


def _no_weights(path: Path, found: str) -> UserError:
    return UserError(
        f"{path} holds {found}, where names and tensors of a model are needed.",
        "Save the model's weights alone: torch.save(model.state_dict(), ...).",
    )


def _without_copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor in memory of its own; of names for the very same one (tied weights) the first is kept.

    The first is the embedding, not the head that is tied to it: models save their parts in the order in
    which tokens pass through them.
    """
    kept: dict[str, torch.Tensor] = {}
    seen: dict[int, set[object]] = {}  # where a tensor begins -> the forms in which it was written
    for name, tensor in tensors.items():
        forms = seen.setdefault(tensor.data_ptr(), set())
        form = (tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and form in forms:
            continue
        shares = bool(forms) or tensor.untyped_storage().nbytes() != tensor.nbytes
        kept[name] = (tensor.detach().clone() if shares else tensor.detach()).contiguous()
        forms.add(form)
    return kept
