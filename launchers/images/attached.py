"""Images in chats: lookup in the rows of a dataset, reading and checks.

An image is a path relative to the dataset's file, a ``data:`` URL, an http(s) URL, the encoded file, or
``{"path": ..., "bytes": ...}`` as ``datasets`` stores it. A row has images in its messages, as parts of
OpenAI's form (``image_url``, ``image``), or in a column ``images`` (or ``image``), one for each ``<image>``
in its texts. Without such marks, the column's images precede the text of the first user turn.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import ipaddress
import itertools
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launchers.dataset.columns import rename_columns
from launchers.dataset.files import BadRow, open_rows
from launchers.dataset.turns import IMAGE, IMAGE_KEYS, IMAGE_PARTS, Fields, Message, decode_json
from launchers.images.decoding import checked
from launchers.images.shards import inside

PLACE = "<image>"  # mark of LLaMA-Factory and LLaVA
COLUMNS = ("images", "image")
MAX_BYTES = 32 << 20  # of one encoded image
MAX_IMAGES = 64  # of one row
TIMEOUT_S = 20.0
_REDIRECTS = 3
_INSPECTED_ROWS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Reads the images of a dataset. ``folder``: folder that relative paths start from.

    ``fetches``: download images from http(s) URLs; otherwise these are returned as empty bytes.
    """

    folder: Path
    fetches: bool = False

    def attach(
        self, messages: Sequence[Message], row: Fields
    ) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
        """Return the turns with a mark for each image, and the images in that order; raises BadRow.

        ``row.parts``: references to images from the parts of the messages; None for parts of text.
        """
        name = row.first(COLUMNS)
        value = decode_json(row[name]) if name else []
        column = list(value) if isinstance(value, (list, tuple)) else [value]
        turns = list(messages)
        if column:
            turns = [replace(turn, content=turn.content.replace(PLACE, IMAGE)) for turn in turns]
        marks = sum(turn.content.count(IMAGE) for turn in turns)
        part_images = [reference for reference in row.parts or () if reference is not None]
        if marks == 0 and column:
            first = next(index for index, turn in enumerate(turns) if turn.role == "user")
            turns[first] = replace(turns[first], content=IMAGE * len(column) + turns[first].content)
            marks = len(column)
        if part_images and column and len(part_images) < marks:
            raise BadRow(f"images both in the messages and in `{name}`")
        references = part_images if part_images else column
        if len(references) != marks:
            images_given = f"`{name}` has {len(column)}" if name else "no `images`"
            raise BadRow(f"{marks} places for images, but {images_given}")
        if marks > MAX_IMAGES:
            raise BadRow(f"{marks} images; at most {MAX_IMAGES} are supported")
        if any(IMAGE in turn.content for turn in turns if turn.role != "user"):
            raise BadRow("an image in a turn that is not the user's")
        images = tuple(self.read(item, f"image {number}") for number, item in enumerate(references, 1))
        return tuple(turns), images

    def read(self, reference: Any, location: str) -> bytes:
        """Return a valid image file with RGB pixels; raises BadRow. ``location``: its location in the row."""
        try:
            data = self._data(reference)
            if len(data) > MAX_BYTES:
                raise BadRow(f"{len(data):,} bytes, more than {MAX_BYTES:,}")
            return checked(data, min_side=1).image if data else b""
        except BadRow as reason:
            raise BadRow(f"{location}: {reason}") from None

    def _data(self, reference: Any) -> bytes:
        if isinstance(reference, Mapping):
            name = next((key for key in IMAGE_KEYS if reference.get(key) not in (None, "", b"")), None)
            if name is None:
                raise BadRow("an image without a path, URL or bytes")
            if name == "base64":
                return _from_base64(str(reference[name]))
            return self._data(reference.get("bytes") or reference[name])
        if isinstance(reference, bytes):
            return reference
        if hasattr(reference, "save"):  # decoded by `datasets`
            file = io.BytesIO()
            reference.save(file, "PNG")
            return file.getvalue()
        if not isinstance(reference, str):
            raise BadRow(f"neither a path, a URL nor an image, but {type(reference).__name__}")
        scheme, _, payload = reference.partition(":")
        if scheme == "data":
            return _from_base64(payload.partition(",")[2])
        if scheme in ("http", "https"):
            return _download(reference) if self.fetches else b""
        return self._file(reference)

    def _file(self, name: str) -> bytes:
        try:
            path = inside(self.folder, name)
            if path.stat().st_size > MAX_BYTES:
                raise BadRow(f"more than {MAX_BYTES:,} bytes")
            return path.read_bytes()
        except FileNotFoundError:
            raise BadRow(f"{name}: there is no such file") from None
        except BadRow as reason:
            raise BadRow(f"{name}: {reason}") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise BadRow(
                f"{name[:80]!r} cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from None


def has_images(path: Path, columns: Mapping[str, str]) -> bool:
    """Whether one of a dataset's first rows has an image."""
    first = itertools.islice(open_rows(path), _INSPECTED_ROWS)
    return any(mentions_images(rename_columns(row, columns)) for _, row in first)


def named_files(path: Path, columns: Mapping[str, str]) -> dict[str, Path]:
    """Return the image files that the rows of a file refer to: path as written in the row -> file.

    Unreadable rows and missing files are skipped; :class:`Reader` reports their errors.
    """
    files: dict[str, Path] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in IMAGE_KEYS:
                collect(value.get(key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif isinstance(value, str) and not value.startswith(("data:", "http:", "https:")):
            with contextlib.suppress(BadRow, OSError, ValueError):
                file = inside(path.parent, value)
                if file.is_file():
                    files[Path(value).as_posix()] = file

    for _, values in open_rows(path):
        row = rename_columns(values, columns)
        if isinstance(row, dict):
            collect([decode_json(row.get(name)) for name in COLUMNS])
            collect([part for part in _parts(row) if _is_image(part)])
    return files


def mentions_images(row: Any) -> bool:
    """Whether a decoded row has images, in any supported form."""
    if not isinstance(row, dict):
        return False
    if any(row.get(name) for name in COLUMNS):
        return True
    return any(_is_image(part) for part in _parts(row))


def _parts(row: Mapping[str, Any]) -> list[Any]:
    """Return all content parts of a row's turns."""
    turns = decode_json(row.get("messages") or row.get("conversations") or row.get("prompt") or [])
    contents = (
        [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    )
    return [part for content in contents if isinstance(content, list) for part in content]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRow("broken base64") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, each to a public address."""

    max_redirections = _REDIRECTS

    def redirect_request(self, *args: Any) -> Any:
        _check_public(args[-1])
        return super().redirect_request(*args)


def _download(url: str) -> bytes:
    """Download an image; raises BadRow for private addresses, failures and files above :data:`MAX_BYTES`."""
    short_url = url if len(url) <= 100 else f"{url[:97]}..."
    try:
        _check_public(url)
        opener = urllib.request.build_opener(_Redirects)
        with opener.open(url, timeout=TIMEOUT_S) as response:
            data: bytes = response.read(MAX_BYTES + 1)
    except BadRow as reason:
        raise BadRow(f"{short_url}: {reason}") from None
    except urllib.error.HTTPError as error:
        raise BadRow(f"{short_url}: the server answers {error.code}") from None
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
        raise BadRow(f"{short_url} cannot be fetched ({getattr(error, 'reason', None) or error})") from None
    if not data:
        raise BadRow(f"{short_url}: an empty file")
    return data


def _check_public(url: str) -> None:
    """Raise BadRow for a URL of another scheme, or of an address that is not public.

    A dataset must not read data that only this machine or its network can access, such as a cloud's metadata
    service.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRow("not an http or https URL")
    for *_, address in socket.getaddrinfo(parts.hostname, parts.port or 443, proto=socket.IPPROTO_TCP):
        if not ipaddress.ip_address(address[0]).is_global:
            raise BadRow(f"{parts.hostname} is not a public address")
