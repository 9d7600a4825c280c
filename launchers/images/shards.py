"""Images that lie in files of their own, or in tars, with a caption beside each: as rows, one by one."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from launchers.dataset.files import BadRow, Rows

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
CAPTIONS = ("text", "caption", "prompt")  # what a caption is called
MEMBER = "member"  # the key of a row under which the name of a tar's member is


class Beside(Rows):
    """The images of a folder and the folders in it, each with NAME.txt beside it."""

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
        beside = name.with_suffix(".txt")
        try:
            caption = _text(inside(self.path, str(beside)).read_bytes())
        except FileNotFoundError:
            return BadRow(f"{name}: no caption: there is no {beside.name} beside it")
        except BadRow as reason:
            return BadRow(f"{beside}: {reason}")
        except (OSError, UnicodeDecodeError) as error:
            return BadRow(f"{beside}: can't be read ({error})")
        return {"file_name": str(name), "text": caption}

    def share(self) -> float:
        return self._done / max(1, len(self._files))


class Tars(Rows):
    """webdataset's tars: members with one name up to their first dot, one after the other, are a row."""

    unit = "image"

    def __init__(self, path: Path, tars: list[Path]) -> None:
        super().__init__(path)
        self._tars, self._share = tars, 0.0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = 0
        for place, tar in enumerate(self._tars):
            self._share = place / len(self._tars)
            for row in _rows(tar):
                number += 1
                yield number, row

    def share(self) -> float:
        return self._share


def inside(folder: Path, name: str) -> Path:
    """The path of an image of that name; raises BadRow where it is, or leads, outside of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadRow("a path that leads outside of the dataset's folder")
    whole = (folder / path).resolve()
    if not whole.is_relative_to(folder.resolve()):
        raise BadRow("a link that leads outside of the dataset's folder")
    return whole


def _rows(tar: Path) -> Iterator[Any]:
    sample: dict[str, bytes] = {}  # by the end of their names
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
                if file is None:
                    yield BadRow(f"{tar.name}/{member.name}: a link or a device, not a file")
                else:
                    sample[end] = file.read()
        if sample:
            yield _row(tar, last, sample)
    except (OSError, tarfile.TarError) as error:
        yield BadRow(f"{tar.name}: a broken archive ({error}), behind {last or 'nothing'}")


def _parts(name: str) -> tuple[str, str]:
    """A member's name up to the first dot of its last part, and the rest of it, as webdataset divides it."""
    path = PurePosixPath(name)
    stem, dot, end = path.name.partition(".")
    return str(path.with_name(stem)) if stem else name, f"{dot}{end}".lower()


def _row(tar: Path, key: str, sample: dict[str, bytes]) -> Any:
    where = f"{tar.name}/{key}"
    end = next((suffix for suffix in SUFFIXES if suffix in sample), None)
    if end is None:
        return BadRow(f"{where}: no image ({', '.join(SUFFIXES)}), only {', '.join(sample)}")
    row = {MEMBER: where + end, "image": sample[end]}
    try:
        if ".txt" in sample:
            return row | {"text": _text(sample[".txt"])}
        if ".json" in sample:
            values = json.loads(sample[".json"])
            found = {name: values.get(name) for name in CAPTIONS} if isinstance(values, dict) else {}
            return row | found
    except (ValueError, RecursionError) as error:
        return BadRow(f"{where}: its caption can't be read ({error})")
    return BadRow(f"{where}: no caption (.txt or .json)")


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig").strip()
