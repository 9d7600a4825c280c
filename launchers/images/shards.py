"""Rows of images with captions, from separate files or from tars."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from estimator.untrusted import parse_json, resolve_inside
from launchers.dataset.files import BadRow, Rows

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
CAPTIONS = ("text", "caption", "prompt")  # accepted names of a caption
MAX_MEMBER_BYTES = 256 * 2**20  # of one file in a tar
_READ = (*SUFFIXES, ".txt", ".json")
MEMBER = "member"  # key of a row with the name of a tar's member


class CaptionFiles(Rows):
    """Images in a folder and its subfolders, each with a caption in NAME.txt."""

    unit = "image"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        self._done = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        self._done = 0
        for file in self._files:
            self._done += 1
            yield self._done, self._row(file.relative_to(self.path))

    def _row(self, name: Path) -> Any:
        caption_file = name.with_suffix(".txt")
        try:
            caption = _text(inside(self.path, str(caption_file)).read_bytes())
        except FileNotFoundError:
            return BadRow(f"{name}: no caption: {caption_file.name} does not exist")
        except BadRow as reason:
            return BadRow(f"{caption_file}: {reason}")
        except (OSError, UnicodeDecodeError) as error:
            return BadRow(f"{caption_file}: cannot be read ({error})")
        return {"file_name": str(name), "text": caption}

    def share(self) -> float:
        return self._done / max(1, len(self._files))


class Tars(Rows):
    """webdataset's tars: consecutive members with the same name up to their first dot form a row."""

    unit = "image"

    def __init__(self, path: Path, tars: list[Path]) -> None:
        super().__init__(path)
        self._tars, self._share = tars, 0.0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = 0
        for index, tar in enumerate(self._tars):
            self._share = index / len(self._tars)
            for row in _rows(tar):
                number += 1
                yield number, row

    def share(self) -> float:
        return self._share


def inside(folder: Path, name: str) -> Path:
    """Resolve an image's path; raises BadRow if it is outside of the folder or links out of it."""
    try:
        return resolve_inside(folder, name)
    except ValueError as reason:
        raise BadRow(str(reason)) from None


def _rows(tar: Path) -> Iterator[Any]:
    sample: dict[str, bytes] = {}  # by suffix
    last = ""
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                key, end = _parts(member.name)
                if key != last and sample:
                    yield _row(tar, last, sample)
                    sample = {}
                last = key
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or member.issparse():
                    yield BadRow(f"{tar.name}/{member.name}: a link, a device or a sparse file")
                elif member.size > MAX_MEMBER_BYTES:
                    yield BadRow(
                        f"{tar.name}/{member.name}: {member.size:,} bytes, and at most "
                        f"{MAX_MEMBER_BYTES:,} are read"
                    )
                else:
                    sample[end] = file.read() if end in _READ else b""
        if sample:
            yield _row(tar, last, sample)
    except (OSError, tarfile.TarError) as error:
        yield BadRow(f"{tar.name}: a broken archive ({error}), behind {last or 'nothing'}")


def _parts(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last part, as webdataset does."""
    path = PurePosixPath(name)
    stem, dot, suffix = path.name.partition(".")
    return str(path.with_name(stem)) if stem else name, f"{dot}{suffix}".lower()


def _row(tar: Path, key: str, sample: dict[str, bytes]) -> Any:
    location = f"{tar.name}/{key}"
    end = next((suffix for suffix in SUFFIXES if suffix in sample), None)
    if end is None:
        return BadRow(f"{location}: no image ({', '.join(SUFFIXES)}), only {', '.join(sample)}")
    row = {MEMBER: location + end, "image": sample[end]}
    try:
        if ".txt" in sample:
            return row | {"text": _text(sample[".txt"])}
        if ".json" in sample:
            values = parse_json(sample[".json"])
            captions = {name: values.get(name) for name in CAPTIONS} if isinstance(values, dict) else {}
            return row | captions
    except ValueError as error:
        return BadRow(f"{location}: its caption cannot be read ({error})")
    return BadRow(f"{location}: no caption (.txt or .json)")


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig").strip()
