"""PyTorch's pickled weights (``pytorch_model*.bin``): safe reading, and conversion to safetensors."""

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
from launchers.base.imports import collector_paused
from launchers.base.workdir import is_caused_by_full_disk
from launchers.models.files import (
    PATTERNS,
    PICKLED_INDEX,
    PICKLED_PATTERNS,
    check_complete,
    is_model_file,
    pickled_files,
)

if TYPE_CHECKING:
    import torch

_RECORD = ".converted_from.json"  # in a converted folder: names and sizes of the source files
# Exceptions of torch.load for bytes that are not a complete pickle
_BROKEN = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
# torch's messages for a pickle's calls: "Unsupported global: GLOBAL os.system was not an allowed global",
# "Trying to load unsupported GLOBAL posix.system whose module posix is blocked"
_CALLED = re.compile(r"GLOBAL ([\w.]+)")


def has_record_of(sizes: Mapping[str, int], folder: Path) -> bool:
    """Whether ``folder`` was converted from files of these names and sizes."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == dict(sizes))


def is_converted_from(source: Path, folder: Path) -> bool:
    """Whether ``folder`` was converted from ``source``, whose files have not changed since."""
    paths = _sources(source)
    if not has_record_of(_sizes(paths), folder):
        return False
    converted_ns = (folder / _RECORD).stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= converted_ns for path in paths)


def convert(source: Path, folder: Path) -> None:
    """Convert a model to safetensors in ``folder`` atomically, replacing its content.

    One file is read at a time, and none of its code is executed. ``source`` is not changed. Raises UserError
    for a pickle that contains anything but tensors, or is unreadable.
    """
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        paths = _sources(source)
        (temporary / _RECORD).write_text(json.dumps(_sizes(paths), indent=2) + "\n", encoding="utf-8")
        for path in paths:
            if is_model_file(path.name, PATTERNS) and path.name != PICKLED_INDEX:
                shutil.copyfile(path, temporary / path.name)
        _write_safetensors(pickled_files(source), temporary)
        check_complete(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sources(folder: Path) -> list[Path]:
    patterns = PATTERNS + PICKLED_PATTERNS
    return [
        path for path in sorted(folder.iterdir()) if path.is_file() and is_model_file(path.name, patterns)
    ]


def _sizes(paths: list[Path]) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in paths}


def _write_safetensors(paths: list[Path], folder: Path) -> None:
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for path in paths:
        name = path.name.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"
        tensors = _deduplicated(read(path))
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
    except SafetensorError as error:  # also raised for a full disk
        if is_caused_by_full_disk(error, path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one file, memory-mapped if its format allows; UserError for any other file."""
    torch = _torch(path)
    mapped = zipfile.is_zipfile(path)  # False for files of torch before 1.6
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        called = _CALLED.search(str(error))
        if called is None:
            raise _unreadable(path, "its pickle has operations that tensors do not need") from None
        raise UserError(
            f"{path} holds more than tensors: it would call {called[1].rstrip('.')}. It is not read, because "
            "that would execute code in the file.",
            "Use the model's *.safetensors, or save only its weights: torch.save(model.state_dict(), ...).",
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
        "Delete it and fetch it again, or use the model's *.safetensors.",
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
        f"{path} holds {found} instead of names and tensors of a model.",
        "Save only the model's weights: torch.save(model.state_dict(), ...).",
    )


def _deduplicated(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each tensor separate memory; of several names for one tensor (tied weights) keep the first.

    The first is the embedding, not the tied head, because models save their parts in the order of the forward
    pass.
    """
    tensors_by_name: dict[str, torch.Tensor] = {}
    forms_by_address: dict[int, set[object]] = {}  # data pointer -> types, shapes and strides
    for name, tensor in tensors.items():
        forms = forms_by_address.setdefault(tensor.data_ptr(), set())
        form = (tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and form in forms:
            continue
        shares = bool(forms) or tensor.untyped_storage().nbytes() != tensor.nbytes
        tensors_by_name[name] = (tensor.detach().clone() if shares else tensor.detach()).contiguous()
        forms.add(form)
    return tensors_by_name
