"""Pickled weights of PyTorch (``pytorch_model*.bin``): safe reading and conversion to safetensors."""

from __future__ import annotations

import pickle
import re
import resource
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from launchers.base.imports import collector_paused
from launchers.models import conversion
from launchers.models.files import pickled_files

if TYPE_CHECKING:
    import torch

_SPARE_BYTES = 2**30  # memory for torch itself while it reads a file
# Exceptions that torch.load raises for incomplete or invalid pickles
_BROKEN = (
    MemoryError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)
# torch's messages for calls in a pickle: "Unsupported global: GLOBAL os.system was not an allowed global",
# "Trying to load unsupported GLOBAL posix.system whose module posix is blocked"
_CALLED = re.compile(r"GLOBAL ([\w.]+)")


def write_safetensors(source: Path, folder: Path) -> None:
    """Convert a model's PyTorch files to safetensors in ``folder``, one file at a time.

    No code in the files is executed. Raises UserError for a pickle that contains anything but tensors, or is
    unreadable.
    """
    files = (
        (
            path.name.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors",
            _deduplicated(path, read(path)),
        )
        for path in pickled_files(source)
    )
    conversion.write_shards(files, folder)


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, memory-mapped if its format allows; raises UserError for other content."""
    torch = _import_torch(path)
    mapped = zipfile.is_zipfile(path)  # false for files of torch before 1.6
    try:
        with _memory_limited(path.stat().st_size):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        match = _CALLED.search(str(error))
        if match is None:
            raise _unreadable(path, "its pickle has operations that tensors do not need") from None
        raise UserError(
            f"{path} holds more than tensors: it would call {match[1].rstrip('.')}. It is not read, because "
            "that would execute code in the file.",
            "Use the model's *.safetensors, or save only its weights: torch.save(model.state_dict(), ...).",
        ) from None
    except _BROKEN as error:
        raise _unreadable(path, str(error).partition("\n")[0] or type(error).__name__) from None
    if not isinstance(content, dict):
        raise _not_weights(path, f"a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise _not_weights(path, f"{name!r} as a {type(value).__name__}")
        if value.nbytes > value.untyped_storage().nbytes():
            raise _unreadable(path, f"{name!r} would have {value.nbytes:,} bytes, of fewer in the file")
    return content


@contextmanager
def _memory_limited(size: int) -> Iterator[None]:
    """Limit the process's memory in the block to what the tensors of a file of ``size`` bytes need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resident_bytes + 3 * size + _SPARE_BYTES
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} cannot be read as a model's weights: {reason}.",
        "Delete it and fetch it again, or use the model's *.safetensors.",
    )


def _import_torch(path: Path) -> Any:
    """Import torch; raises UserError if it is not installed."""
    try:
        with collector_paused():
            import torch
    except ImportError:
        raise UserError(
            f"{path} cannot be read here: torch is not installed.", "pip install 'metaflow-finetune[train]'"
        ) from None
    return torch


def _not_weights(path: Path, content: str) -> UserError:
    return UserError(
        f"{path} holds {content} instead of names and tensors of a model.",
        "Save only the model's weights: torch.save(model.state_dict(), ...).",
    )


def _deduplicated(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory; of several names of one tensor (tied weights) keep only the first.

    The first is the embedding, not the tied head, because models save their modules in the order of the
    forward pass. Raises UserError if the tensors need more than twice the size of the file.
    """
    tensors_by_name: dict[str, torch.Tensor] = {}
    total_bytes, limit_bytes = 0, 2 * path.stat().st_size
    forms_by_address: dict[int, set[object]] = {}  # data pointer -> types, shapes and strides
    for name, tensor in tensors.items():
        forms = forms_by_address.setdefault(tensor.data_ptr(), set())
        form = (tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and form in forms:
            continue
        total_bytes += tensor.nbytes
        if total_bytes > limit_bytes:
            raise _unreadable(path, f"its tensors have more than {limit_bytes:,} bytes")
        shares = bool(forms) or tensor.untyped_storage().nbytes() != tensor.nbytes
        tensors_by_name[name] = (tensor.detach().clone() if shares else tensor.detach()).contiguous()
        forms.add(form)
    return tensors_by_name
