"""Datasets of images with captions: supported forms, and error messages for invalid rows.

* a folder in the form of ``datasets`` (imagefolder): metadata.jsonl, metadata.csv or metadata.parquet, whose
  rows name a file (``file_name``) and its caption (``text``, ``caption`` or ``prompt``)
* a folder of images with NAME.txt next to each
* JSONL, JSON, CSV or Parquet of such rows (``image`` or ``file_name``, a path relative to the file); in
  Parquet ``image`` may be the encoded image, as stored by ``datasets``
* webdataset: a .tar, or a folder of them, of KEY.jpg (.png, .webp) and KEY.txt or KEY.json

Images outside of the dataset's folder are refused, also if a symbolic link leads there. Duplicate images are
kept as separate rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.terminal import print
from launchers.dataset.columns import UnknownColumns
from launchers.dataset.files import BadRow, Rows, open_rows
from launchers.dataset.picture import Picture
from launchers.dataset.rows import NO_COLUMNS, read_rows
from launchers.dataset.turns import Fields
from launchers.images.decoding import checked
from launchers.images.shards import CAPTIONS, MEMBER, CaptionFiles, Tars, inside

__all__ = ["Picture", "read"]

FORMS = (
    "a folder with metadata.jsonl (.csv, .parquet), a folder of images with NAME.txt files, JSONL, CSV or "
    "Parquet that names images and captions, or webdataset's .tar"
)
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_FILES = ("file_name", "image")


def read(path: Path, *, min_side: int, columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[Picture]:
    """Read and check the images of a dataset one by one.

    ``min_side``: minimum pixels of the shorter side. After the last row raises UserError that lists the bad
    rows (:func:`launchers.dataset.rows.read_rows`); changes to images are reported on standard error.
    """
    rows, folder = _rows(path)
    parser = _Parser(folder, min_side)
    yield from read_rows(rows, parser.parse, columns, FORMS)
    if parser.changed:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(parser.changes.items()))
        print(f"Dataset {path}: {parser.changed:,} images were changed: {kinds}", file=sys.stderr, flush=True)


def named_files(path: Path) -> dict[str, Path]:
    """Return the image files that the rows of a file refer to, by their names in the rows; empty for tars.

    Unreadable rows and missing files are skipped; :func:`read` reports their errors. Raises UserError for a
    name that leads out of the folder.
    """
    rows, folder = _rows(path)
    files: dict[str, Path] = {}
    for number, row in rows:
        fields = row if isinstance(row, dict) else {}
        for value in (fields.get(key) for key in _FILES):
            name = value.get("path") if isinstance(value, dict) and not value.get("bytes") else value
            if not isinstance(name, str):
                continue
            try:
                file = inside(folder, name)
            except BadRow as reason:
                raise UserError(
                    f"Dataset {path}, {rows.unit} {number}: {name}: {reason}.",
                    "Name files in the folder of the dataset, by paths relative to it.",
                ) from None
            if _is_file(file):
                files[Path(name).as_posix()] = file
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # e.g. a name that is too long
        return False


def _rows(path: Path) -> tuple[Rows, Path]:
    """Return the rows of a dataset, and the folder of its images."""
    if path.suffix.lower() == ".tar" and path.is_file():
        return Tars(path, [path]), path.parent
    if not path.is_dir():
        return open_rows(path), path.parent
    metadata = next((path / name for name in _METADATA if (path / name).is_file()), None)
    if metadata is not None:
        return open_rows(metadata), path
    tars = sorted(path.glob("*.tar"))
    return (Tars(path, tars) if tars else CaptionFiles(path)), path


class _Parser:
    """Converts rows to pictures, and counts the changes."""

    def __init__(self, folder: Path, min_side: int) -> None:
        self._folder, self._min_side = folder, min_side
        self.changed = 0  # number of changed images
        self.changes: Counter[str] = Counter()  # by kind; an image may have several

    def parse(self, row: Fields, line: int) -> Picture:
        """Convert one decoded row; raises BadRow with the image's name, if it has one."""
        name = row.get(MEMBER)
        key = row.first(_FILES)
        if key is None:
            reason = f"no image: {' or '.join(f'`{option}`' for option in _FILES)} is missing or empty"
            raise UnknownColumns(reason, row, ["image"])
        value = row[key]
        name = value if name is None and isinstance(value, str) else name
        try:
            return self._picture(row, value, key, line)
        except BadRow as reason:
            raise BadRow(f"{name}: {reason}" if name else str(reason)) from None

    def _picture(self, row: Fields, value: Any, key: str, line: int) -> Picture:
        caption = _caption(row)
        image = checked(self._data(value, key), min_side=self._min_side)
        if image.changes:
            self.changed += 1
            self.changes.update(image.changes)
        return Picture(caption=caption, image=image.image, width=image.width, height=image.height, line=line)

    def _data(self, value: Any, key: str) -> bytes:
        """Return the bytes of an image, from its file or from the row."""
        if isinstance(value, dict):  # datasets' feature Image
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise BadRow(f"`{key}` is neither a path nor an image")
        try:
            return inside(self._folder, value).read_bytes()
        except FileNotFoundError:
            raise BadRow("there is no such file") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise BadRow(f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _caption(row: Fields) -> str:
    name = row.first(CAPTIONS)
    if name is None:
        raise BadRow(f"no caption: {', '.join(f'`{key}`' for key in CAPTIONS)} are missing or empty")
    value = row[name]
    if not isinstance(value, str):
        raise BadRow(f"the caption `{name}` is not text")
    if not value.strip():
        raise BadRow(f"the caption `{name}` is empty")
    return value.strip()
