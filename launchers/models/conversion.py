"""One-time conversion of a model folder to another folder, atomically, with one shard in memory at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.base.workdir import is_caused_by_full_disk
from launchers.models.files import (
    INDEX,
    PATTERNS,
    PICKLED_INDEX,
    PICKLED_PATTERNS,
    check_complete,
    is_model_file,
)

if TYPE_CHECKING:
    import torch

_RECORD = ".converted_from.json"  # file of a converted folder: names and sizes of the source files
_WEIGHTS = (".safetensors", ".bin", INDEX, PICKLED_INDEX)


def has_record_of(sizes: Mapping[str, int], folder: Path) -> bool:
    """Whether ``folder`` was converted from files with these names and sizes (bytes)."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == dict(sizes))


def is_converted_from(source: Path, folder: Path) -> bool:
    """Whether ``folder`` was converted from the present files of ``source``."""
    paths = _files_to_convert(source)
    if not has_record_of(_sizes(paths), folder):
        return False
    converted_ns = (folder / _RECORD).stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= converted_ns for path in paths)


def convert(source: Path, folder: Path, write: Callable[[Path, Path], None]) -> None:
    """Convert the model in ``source`` to ``folder`` atomically, replacing the folder's content.

    ``write(source, destination)`` writes the weights; all other files are copied before, and ``write`` may
    change the copies. ``source`` is not changed, unless it is ``folder`` itself.
    """
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        paths = _files_to_convert(source)
        (temporary / _RECORD).write_text(json.dumps(_sizes(paths), indent=2) + "\n", encoding="utf-8")
        for path in paths:
            if not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, temporary / path.name)
        write(source, temporary)
        check_complete(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files_to_convert(folder: Path) -> list[Path]:
    """List the files of a model to convert, sorted."""
    patterns = PATTERNS + PICKLED_PATTERNS
    return [
        path for path in sorted(folder.iterdir()) if path.is_file() and is_model_file(path.name, patterns)
    ]


def _sizes(paths: list[Path]) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in paths}


def write_shards(shards: Iterable[tuple[str, dict[str, torch.Tensor]]], folder: Path) -> None:
    """Write safetensors files, given as (file name, tensors), and an index if there are several."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for name, tensors in shards:
        _save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        path = folder / INDEX
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; raises OSError (ENOSPC) if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # also raised for a full disk
        if is_caused_by_full_disk(error, path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
