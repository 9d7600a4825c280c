"""Reading of files from other people: within limits of size and depth, and inside of their folder.

JSON and YAML raise the errors that their parsers raise, so that callers catch ValueError or YAMLError alone.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

from estimator.errors import UserError

MAX_DEPTH = 100
"""Maximum nesting of JSON and YAML, far below Python's recursion limit of about 1,000."""
MAX_TEXT_BYTES = 64 * 2**20
"""Maximum size of a JSON file of a model or tokenizer. Published tokenizer.json have up to 33 MB."""
MAX_PACKED_BYTES = 16 * 2**20
"""Maximum unpacked size of the text in an environment variable. The largest plans have about 30 KB."""
MAX_YAML_BYTES = 128 * 2**10
"""Maximum size of a YAML file. PyYAML takes up to 3 s/MiB, or 25 s/MiB without its C extension."""
_MAX_NAME = 200  # characters; file systems allow 255 bytes
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # folders of a repository in the Hugging Face cache


class DeepError(ValueError):
    """Error for JSON or YAML with more than ``MAX_DEPTH`` levels."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError for invalid text, and for more than ``MAX_DEPTH`` levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise DeepError from None
    return check_depth(value)


def yaml_loader() -> type[Any]:
    """Return YAML's safe loader, written in C where PyYAML has it, which takes a tenth of the time."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, loader: type[Any] | None = None) -> Any:
    """Parse one YAML document; raises YAMLError for invalid text, aliases, and exceeded limits.

    ``loader`` is a subclass of :func:`yaml_loader`. Aliases are refused because a few hundred bytes of them
    expand to gigabytes.
    """
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and at most {MAX_YAML_BYTES:,} are read")
    loader = loader or yaml_loader()
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            line = event.start_mark.line + 1 if event.start_mark else 1
            if depth > MAX_DEPTH:
                raise yaml.YAMLError(f"line {line}: it is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"line {line}: aliases (*name) are not supported")
        return yaml.load(text, Loader=loader)  # noqa: S506 - a SafeLoader
    except (ValueError, TypeError, OverflowError) as error:  # of its dates, numbers and keys
        raise yaml.YAMLError(f"a value cannot be read ({error})") from None


def check_depth(value: Any) -> Any:
    """Return the JSON-like value unchanged; raises DeepError for more than ``MAX_DEPTH`` levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return value
    raise DeepError


def read_text(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file; raises OSError, UnicodeDecodeError, or UserError above ``most_bytes``."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UserError(f"{path} has more than {most_bytes:,} bytes, the limit of such a file.")
    return data.decode()


def read_json_object(path: Path, advice: str = "Fetch it again.") -> dict[str, Any]:
    """Read a file that contains a JSON object; raises UserError for any other."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", advice) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.", advice) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object.", advice)
    return values


def pack(text: str) -> str:
    """Compress text to one word for an environment variable; AWS Batch limits all to 8,192 characters."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(packed: str) -> str:
    """Restore the text of :func:`pack`; raises ValueError with a clause for damaged or excessive data."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(packed, validate=True), MAX_PACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"its compressed data is damaged ({error})") from None
    if not stream.eof:
        excessive = len(data) >= MAX_PACKED_BYTES
        raise ValueError(f"it has more than {MAX_PACKED_BYTES:,} bytes" if excessive else "it is cut off")
    return data.decode()


def plain_name(name: object) -> str:
    """Return ``name`` if it is a plain file or folder name; raises ValueError for a path."""
    if not isinstance(name, str) or name in ("", "..") or set(name) & set("/\0") or len(name) > _MAX_NAME:
        raise ValueError(f"{name!r:.100} is not a plain file name")
    return name


def resolve_inside(folder: Path, name: str) -> Path:
    """Resolve a path in ``folder``; raises ValueError with a clause if it leads out of the folder."""
    path = Path(name)
    if "\0" in name or path.is_absolute() or ".." in path.parts:
        raise ValueError("a path that leads outside of the folder")
    return _resolved(folder, folder / path)


def list_contained_files(folder: Path) -> list[Path]:
    """List all files of a folder and its subfolders, sorted; raises UserError if a link leads out of it.

    Allowed are links from a snapshot in a Hugging Face cache to the ``blobs`` of the same repository. A
    link to a folder inside is not followed.
    """
    files: list[Path] = []
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    _check_link(folder, path)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file():
                    files.append(path)
    return sorted(files)


def _check_link(folder: Path, path: Path) -> None:
    try:
        _resolved(folder, path)
    except ValueError as reason:
        raise UserError(
            f"{path} is {reason}.", "Copy the file there if it belongs to it, or remove the link."
        ) from None


def _resolved(folder: Path, path: Path) -> Path:
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that form a loop
        raise ValueError(f"a path that cannot be read ({error})") from None
    blobs = root.parent.parent / _BLOBS if root.parent.name == _SNAPSHOTS else root
    if not (target.is_relative_to(root) or target.parent == blobs):
        raise ValueError("a link that leads outside of the folder")
    return target
