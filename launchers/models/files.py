"""A model's folder in Hugging Face's layout: what belongs to it, and whether it is whole."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from estimator.errors import UserError

# Configuration, tokenizer, safetensors. Not other formats of the same weights, not folders.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
NOT_PATTERNS = ("*/*", "consolidated*", "adapter_*")
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_LFS_POINTER = b"version https://git-lfs"


def check_complete(folder: Path) -> None:
    """Raise UserError unless config.json, a tokenizer and all weights are there, whole, of one shape.

    Reads the headers of the safetensors files, not the weights.
    """
    if not folder.is_dir():
        raise UserError(f"There is no model directory {folder}.")
    config = read_config(folder)
    tokenizers = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
    if not any(all((folder / name).is_file() for name in names) for names in tokenizers):
        raise UserError(f"{folder} has no tokenizer.", "tokenizer.json (or tokenizer.model) belongs there.")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        shapes |= _read_header(path)
    _check_index(folder, shapes)
    _check_embedding(folder, config, shapes)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; raises UserError where there is none or it can't be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json.", "Give a folder in Hugging Face's layout.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object.")
    return config


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name by the index; empty where there is no index."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} can't be read.", "Fetch it again.") from None


def _weight_files(folder: Path) -> list[Path]:
    listed = sorted(set(_weight_map(folder).values()))
    if listed:
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {len(listed)} weight files are missing, {missing[0]} first.",
                f"They are listed in {_INDEX}; fetch them again.",
            )
        return [folder / name for name in listed]
    found = sorted(path for path in folder.glob("*.safetensors") if is_wanted(path.name))
    if not found:
        other = sorted([*folder.glob("adapter_model.*"), *folder.glob("*.bin"), *folder.glob("*.pth")])
        advice = "*.safetensors belong there."
        if other:
            advice = f"It has {other[0].name}, but *.safetensors of the whole model are needed."
        raise UserError(f"No weights in {folder}.", advice)
    return found


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a safetensors file; raises UserError unless the file is as long as its header says.

    The format: 8 bytes of header length, a JSON header, the data
    (https://github.com/huggingface/safetensors#format).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(max(8, len(_LFS_POINTER)))
        if head.startswith(_LFS_POINTER):
            raise UserError(f"{path} is a Git LFS pointer, not the weights.", "Run: git lfs pull")
        length = int.from_bytes(head[:8], "little")
        if 8 < size < 8 + length <= 8 + _MAX_HEADER_BYTES:
            raise _truncated(path, size, f"at least {8 + length:,}")
        try:
            if size <= 8 or length > _MAX_HEADER_BYTES:
                raise ValueError("no header")
            file.seek(8)
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            expected = 8 + length + max((int(t["data_offsets"][1]) for t in header.values()), default=0)
            shapes = {name: tuple(int(n) for n in tensor["shape"]) for name, tensor in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise UserError(f"{path} is not a safetensors file.", "Delete it and fetch it again.") from None
    if size < expected:
        raise _truncated(path, size, f"{expected:,}")
    if size > expected:
        raise UserError(
            f"{path} is broken: {size:,} bytes, but its header says {expected:,}.",
            "Delete it and fetch it again.",
        )
    return shapes


def _truncated(path: Path, size: int, expected: str) -> UserError:
    return UserError(
        f"{path} is truncated: {size:,} of {expected} bytes.", "Delete it and fetch or copy it again."
    )


def _check_index(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in _weight_map(folder) if name not in shapes]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} tensors of {_INDEX} are in none of the files, {missing[0]} first.",
            "Index and files are of different versions; fetch them again.",
        )


def _check_embedding(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    embedding = next((shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), None)
    if embedding is None:
        raise UserError(
            f"{folder}: the weights have no token embedding (embed_tokens.weight).",
            "Give a whole model in Hugging Face's layout.",
        )
    text = config.get("text_config") or config
    expected = (text.get("vocab_size"), text.get("hidden_size"))
    if embedding != expected:
        raise UserError(
            f"{folder}: the weights' embedding is {list(embedding)}, config.json says vocab_size "
            f"{expected[0]} and hidden_size {expected[1]}.",
            "Weights and config.json are of different models.",
        )


def is_wanted(name: str) -> bool:
    """Whether a file of this name, as a path in the folder, is one of the model's."""
    return any(fnmatch.fnmatch(name, p) for p in PATTERNS) and not any(
        fnmatch.fnmatch(name, p) for p in NOT_PATTERNS
    )
