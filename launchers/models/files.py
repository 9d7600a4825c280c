"""Files of a model folder in Hugging Face's layout, and verification of their completeness."""

from __future__ import annotations

import fnmatch
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.untrusted import parse_json, plain_name, read_json_object

# Files to fetch: configuration, tokenizer, safetensors, code; no weights in other formats, no subfolders
PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "merges.txt",
    "vocab.txt",
    "*.py",
)
NOT_PATTERNS = ("*/*", "consolidated*", "adapter_*")
# PyTorch files, for models without safetensors; no variants in another data type
PICKLED_PATTERNS = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
INDEX = "model.safetensors.index.json"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_PART = re.compile(r"-\d+-of-\d+\.")
_TRAINABLE = ("F64", "F32", "F16", "BF16")  # names of data types in safetensors
# Names of the token embedding in Llama-like models, DeepSeek V4, GPT-NeoX, GPT-J and MPT, Falcon, Nemotron-H
_EMBEDDINGS = (
    "embed_tokens.weight",
    "embed.weight",
    "embed_in.weight",
    "wte.weight",
    "word_embeddings.weight",
    ".embeddings.weight",
)
_MAX_HEADER_BYTES = 100_000_000  # limit of safetensors
_LFS_POINTER = b"version https://git-lfs"


def check_complete(folder: Path) -> None:
    """Raise UserError unless config.json, a tokenizer and all weights are present and intact.

    Of safetensors files only the headers are read; the shape of the embedding must match config.json. Of
    ``pytorch_model*.bin`` (:func:`pickled_files`) only the container format is checked.
    """
    if not folder.is_dir():
        raise UserError(f"There is no model directory {folder}.")
    config = read_config(folder)
    tokenizers = (
        ("tokenizer.json",),
        ("tokenizer.model",),
        ("tiktoken.model",),
        ("vocab.json", "merges.txt"),
    )
    if not any(all((folder / name).is_file() for name in names) for names in tokenizers):
        raise UserError(f"{folder} has no tokenizer.", "Add tokenizer.json or tokenizer.model.")
    for name in ("tokenizer_config.json", "generation_config.json"):  # copied by the export
        if (folder / name).exists():
            read_json_object(folder / name)
    pickled = pickled_files(folder)
    if pickled:
        for path in pickled:
            _check_pickled(path)
        return
    shapes = tensor_shapes(folder, quantized="quantization_config" in config)
    _check_index(folder, shapes)
    _check_embedding(folder, config, shapes)


def tensor_shapes(folder: Path, *, quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Read tensor name -> shape from the headers of safetensors files; raises UserError for broken files.

    Also raises UserError for weights of other types than 16, 32 and 64 bits, unless ``quantized``.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        shapes |= read_header(path, quantized=quantized)
    return shapes


def pickled_files(folder: Path) -> list[Path]:
    """List the model's PyTorch files; empty if it has safetensors, which take precedence.

    Raises UserError if files of the index are missing.
    """
    if (folder / INDEX).exists() or any(is_model_file(path.name) for path in folder.glob("*.safetensors")):
        return []
    listed = sorted(set(_weight_map(folder, PICKLED_INDEX).values()))
    if listed:
        return _check_listed(folder, listed, PICKLED_INDEX)
    return [path for path in [folder / "pytorch_model.bin"] if path.is_file()]


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; raises UserError if it is missing or unreadable."""
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json.", "Use a folder in Hugging Face's layout.")
    return read_json_object(folder / "config.json")


def _weight_map(folder: Path, index: str = INDEX) -> dict[str, str]:
    """Read tensor name -> file name from an index; empty if there is no index."""
    path = folder / index
    if not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{path} has no weight_map.", "Fetch it again.")
    try:
        return {name: plain_name(file) for name, file in weight_map.items()}
    except ValueError as reason:
        raise UserError(f"{path}: {reason}.", "Fetch it again, or list files of that folder alone.") from None


def weight_files(folder: Path) -> list[Path]:
    """List a folder's safetensors, by the index if it has one; raises UserError if files are missing."""
    listed = sorted(set(_weight_map(folder).values()))
    if listed:
        return _check_listed(folder, listed, INDEX)
    files = sorted(path for path in folder.glob("*.safetensors") if is_model_file(path.name))
    if not files:
        unsupported = sorted(
            [
                *folder.glob("adapter_model.*"),
                *folder.glob("*.bin"),
                *folder.glob("*.pth"),
                *folder.glob("*.gguf"),
            ]
        )
        advice = "Add *.safetensors or pytorch_model*.bin."
        if unsupported:
            advice = f"It has {unsupported[0].name}, but *.safetensors or pytorch_model*.bin are needed."
        raise UserError(f"No weights in {folder}.", advice)
    part = next((path.name for path in files if _PART.search(path.name)), None)
    if part:  # a download was interrupted before the index
        raise UserError(
            f"{folder} has {part}, one part of the weights, and no {INDEX}.",
            "Fetch it again: the index lists the parts of the model.",
        )
    return files


def _check_listed(folder: Path, listed: list[str], index: str) -> list[Path]:
    """Return the paths of the files listed in an index; raises UserError if one does not exist."""
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(listed)} weight files are missing, {missing[0]} first.",
            f"They are listed in {index}; fetch them again.",
        )
    return [folder / name for name in listed]


def _check_pickled(path: Path) -> None:
    """Raise UserError unless the file has a format of torch.save: zip, or pickle before torch 1.6."""
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
    if head == _LFS_POINTER:
        raise _lfs_pointer(path)
    if head.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is truncated.", "Delete it and fetch or copy it again.")
    if not head.startswith((b"PK", b"\x80")):
        raise UserError(f"{path} is not a PyTorch file.", "Delete it and fetch it again.")


def read_header(path: Path, *, quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Read tensor name -> shape from a safetensors file; raises UserError unless its size matches the header.

    ``quantized``: allow weights of any type. Format: 8 bytes of header length, a JSON header, the data
    (https://github.com/huggingface/safetensors#format).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(max(8, len(_LFS_POINTER)))
        if head.startswith(_LFS_POINTER):
            raise _lfs_pointer(path)
        length = int.from_bytes(head[:8], "little")
        if 8 < size < 8 + length <= 8 + _MAX_HEADER_BYTES:
            raise _truncated(path, size, f"at least {8 + length:,}")
        try:
            if size <= 8 or length > _MAX_HEADER_BYTES:
                raise ValueError("no header")
            file.seek(8)
            header = parse_json(file.read(length))
            header.pop("__metadata__", None)
            expected = 8 + length + max((int(t["data_offsets"][1]) for t in header.values()), default=0)
            shapes = {name: tuple(int(n) for n in tensor["shape"]) for name, tensor in header.items()}
            kinds = {name: str(tensor["dtype"]) for name, tensor in header.items() if name.endswith("weight")}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise UserError(f"{path} is not a safetensors file.", "Delete it and fetch it again.") from None
    if size < expected:
        raise _truncated(path, size, f"{expected:,}")
    unsupported_weight = next((name for name, kind in kinds.items() if kind not in _TRAINABLE), None)
    if unsupported_weight is not None and not quantized:
        raise UserError(
            f"{path}: {unsupported_weight} is of type {kinds[unsupported_weight]}, which cannot be trained.",
            "Start from the unquantized model; --method qlora quantizes it on loading.",
        )
    if size > expected:
        raise UserError(
            f"{path} is broken: {size:,} bytes, but its header says {expected:,}.",
            "Delete it and fetch it again.",
        )
    return shapes


def _lfs_pointer(path: Path) -> UserError:
    return UserError(f"{path} is a Git LFS pointer, not the weights.", "Run: git lfs pull")


def _truncated(path: Path, size: int, expected: str) -> UserError:
    return UserError(
        f"{path} is truncated: {size:,} of {expected} bytes.", "Delete it and fetch or copy it again."
    )


def _check_index(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError if the index lists tensors that no file has."""
    missing = [name for name in _weight_map(folder) if name not in shapes]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} tensors of {INDEX} are in none of the files, {missing[0]} first.",
            "Index and files are of different versions; fetch them again.",
        )


def _check_embedding(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError unless the shape of the token embedding matches config.json."""
    text = config.get("text_config") or config
    expected = (text.get("vocab_size"), text.get("hidden_size"))
    embedding = next((shape for name, shape in shapes.items() if name.endswith(_EMBEDDINGS)), None)
    if embedding is None:
        raise UserError(
            f"{folder}: the weights have no token embedding (embed_tokens.weight).",
            "Use a complete model in Hugging Face's layout.",
        )
    if embedding != expected:
        raise UserError(
            f"{folder}: the weights' embedding is {list(embedding)}, config.json says vocab_size "
            f"{expected[0]} and hidden_size {expected[1]}.",
            "Weights and config.json are of different models.",
        )


def is_model_file(
    name: str, patterns: Iterable[str] = PATTERNS, excluded: Iterable[str] = NOT_PATTERNS
) -> bool:
    """Whether a file with this relative path belongs to the model."""
    return any(fnmatch.fnmatch(name, p) for p in patterns) and not any(
        fnmatch.fnmatch(name, p) for p in excluded
    )


def patterns_for(names: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of files to fetch; with PyTorch files if the model has no safetensors."""
    safetensors = any(name.endswith(".safetensors") and is_model_file(name) for name in names)
    return PATTERNS if safetensors else PATTERNS + PICKLED_PATTERNS
