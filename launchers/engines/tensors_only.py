"""Reading of checkpoint files without executing code in them: tensors and plain values only.

torch's files are pickles, and a pickle may call anything. Anyone who can write to the store of checkpoints
could otherwise run code in every rank that resumes from one.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.serialization import _get_layout

from estimator.errors import UserError

# Error of torch and _Unpickler for a function in a pickle: "Unsupported global: GLOBAL os.system was not ..."
_CALLED = re.compile(r"GLOBAL ([\w.]+)")
# Makes torch.load use weights_only=True even if its caller, such as a library, passes False
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# Classes in .metadata, in addition to torch's dtypes. None of them has side effects when called.
_PLAIN: dict[tuple[str, str], Any] = {
    (metadata_class.__module__, metadata_class.__qualname__): metadata_class
    for metadata_class in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
        _get_layout,
        torch.Size,
    )
}
# Modules of the path class in Python up to 3.12, and in 3.13
_PLAIN |= {(module, "PosixPath"): PosixPath for module in ("pathlib", "pathlib._local")}


@contextmanager
def tensors_only(folder: Path, classes: Sequence[Any] = ()) -> Iterator[None]:
    """Restrict torch.load to tensors, plain values and ``classes``, whatever calls it.

    Raises UserError for a file of ``folder`` that holds anything else.
    """
    previous = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    except pickle.UnpicklingError as error:
        raise _refusal(folder, str(error)) from None
    except CheckpointException as error:  # raised on every rank for the failures of all; no Exception
        for failure, _ in error.failures.values():
            if isinstance(failure, pickle.UnpicklingError):
                raise _refusal(folder, str(failure)) from None
        raise
    finally:
        if previous is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = previous


def load_distributed(state: dict[str, Any], folder: Path) -> None:
    """Fill ``state`` in place from a checkpoint of torch's DCP (distributed checkpoint) in ``folder``.

    Raises UserError for a file that holds more than tensors and plain values.
    """
    reader = _Reader(folder)
    with tensors_only(folder):
        reader.read_metadata()  # DCP would continue after a refusal, and raise another error
        state_dict_loader.load(state, storage_reader=reader)


class _Reader(FileSystemReader):
    """Reader of a DCP checkpoint that restricts .metadata, a pickle which DCP loads without restrictions."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:  # noqa: ARG002 - as torch calls it
        """Read the index of the tensors. Raises UnpicklingError if the file would call anything unneeded."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            checkpoint_metadata: metadata.Metadata = _Unpickler(file).load()
        if checkpoint_metadata.storage_meta is None:
            checkpoint_metadata.storage_meta = metadata.StorageMeta()
        checkpoint_metadata.storage_meta.load_id = self.load_id
        return checkpoint_metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _refusal(folder: Path, message: str) -> UserError:
    match = _CALLED.search(message)
    problem = f"a file would call {match[1].rstrip('.')}" if match else "a file is broken"
    return UserError(
        f"The checkpoint in {folder} holds more than tensors and plain values, or is damaged: {problem}. It"
        " is not read, because that would run code from the file.",
        "Resume from a checkpoint of this version of the package, or start from the beginning.",
    )
