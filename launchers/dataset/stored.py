"""Validated rows on disk: written one by one, read by index, never all in memory.

Contents of the folder::

    rows.jsonl      one row per line, in a short form (:func:`encode`)
    offsets.npy     int64 [rows + 1], start of each line
    sources.npy     int32 [rows], index of the row's dataset in the run
    characters.npy  int64 [rows], length of a plain text (0 for a chat)
    info.json       {"fingerprint": sha256 of rows.jsonl}
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from launchers.dataset.picture import Picture
from launchers.dataset.preferences import Judged, Pair, Sample
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message

if TYPE_CHECKING:  # takes a tenth of a second to import; the flow's processes need only the names
    import numpy as np
    from numpy.typing import NDArray

_ROWS, _INFO = "rows.jsonl", "info.json"
_BUFFER = 1 << 20


class Writer:
    """Writer of a folder of rows; info.json is written last, so a folder without it is incomplete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        (folder / _INFO).unlink(missing_ok=True)
        self._file = (folder / _ROWS).open("wb", buffering=_BUFFER)
        self._digest = hashlib.sha256()
        self._offsets, self._sources, self._characters = array("q", [0]), array("i"), array("q")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            self._write_index()

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, row: Sample) -> None:
        """Append a row."""
        line = encode(row) + b"\n"
        self._file.write(line)
        self._digest.update(line)
        self._offsets.append(self._offsets[-1] + len(line))
        self._sources.append(row.source)
        self._characters.append(_characters(row))

    def _write_index(self) -> None:
        import numpy as np

        np.save(self._folder / "offsets.npy", np.frombuffer(self._offsets, dtype=np.int64))
        np.save(self._folder / "sources.npy", np.frombuffer(self._sources, dtype=np.int32))
        np.save(self._folder / "characters.npy", np.frombuffer(self._characters, dtype=np.int64))
        (self._folder / _INFO).write_text(json.dumps({"fingerprint": self._digest.hexdigest()}))


class StoredRows(Sequence[Sample]):
    """Rows of a folder written by :class:`Writer`."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self.folder = folder
        self.fingerprint = str(json.loads((folder / _INFO).read_text())["fingerprint"])
        self.offsets: NDArray[np.int64] = np.load(folder / "offsets.npy", mmap_mode="r")
        self.sources: NDArray[np.int32] = np.load(folder / "sources.npy", mmap_mode="r")
        self.characters: NDArray[np.int64] = np.load(folder / "characters.npy", mmap_mode="r")

    @cached_property
    def _file(self) -> Any:
        return (self.folder / _ROWS).open("rb", buffering=_BUFFER)

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        first, last = self.offsets[place % len(self)], self.offsets[place % len(self) + 1]
        self._file.seek(int(first))
        return decode(self._file.read(int(last - first)))


class Selected(Sequence[Sample]):
    """Selection of rows in any order; each row is read when it is accessed.

    ``places``: indices of the rows. ``replaced``: replacements by index in ``rows``.
    """

    def __init__(
        self,
        rows: Sequence[Sample],
        places: NDArray[np.integer],
        replaced: Mapping[int, Sample] | None = None,
    ) -> None:
        self.replaced = dict(replaced or {})
        if isinstance(rows, Selected):
            self.replaced = {int(rows.places[place]): row for place, row in self.replaced.items()}
            self.replaced = rows.replaced | self.replaced
            places = rows.places[places]
        self.rows: Sequence[Sample] = rows.rows if isinstance(rows, Selected) else rows
        self.places: NDArray[np.integer] = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(place, slice):
            return Selected(self.rows, self.places[place], self.replaced)
        index = int(self.places[place])
        return self.replaced[index] if index in self.replaced else self.rows[index]


def sources_of(rows: Sequence[Sample]) -> NDArray[np.int32]:
    """Return [rows]: index of each row's dataset in the run."""
    import numpy as np

    if isinstance(rows, StoredRows):
        return rows.sources
    if isinstance(rows, Selected):
        sources: NDArray[np.int32] = sources_of(rows.rows)[rows.places]
        return sources
    return np.array([row.source for row in rows], dtype=np.int32)


def characters_of(rows: Sequence[Sample]) -> NDArray[np.int64]:
    """Return [rows]: length of each row's plain text."""
    import numpy as np

    if isinstance(rows, StoredRows):
        return rows.characters
    if isinstance(rows, Selected) and not rows.replaced:
        characters: NDArray[np.int64] = characters_of(rows.rows)[rows.places]
        return characters
    return np.array([_characters(row) for row in rows], dtype=np.int64)


def joined(parts: Sequence[Selected]) -> Selected:
    """Concatenate selections of the same rows. Replacements of the same row must be equal."""
    import numpy as np

    replaced = {place: row for part in parts for place, row in part.replaced.items()}
    return Selected(parts[0].rows, np.concatenate([part.places for part in parts]), replaced)


def _characters(row: Sample) -> int:
    return len(row.text) if isinstance(row, Conversation) and row.text is not None else 0


# One row as JSON, with lists for values identified by order, and without empty values


def encode(row: Sample) -> bytes:
    """Encode a row as one line of JSON, without the line break."""
    if isinstance(row, Pair):
        value: Any = {"chosen": _values(row.chosen), "rejected": _values(row.rejected)}
    elif isinstance(row, Judged):
        value = {"judged": _values(row.conversation), "good": row.desirable}
    elif isinstance(row, Picture):
        image = base64.b64encode(row.image).decode()
        value = {
            "at": [row.line, row.source],
            "caption": row.caption,
            "size": [row.width, row.height],
            "image": image,
        }
    else:
        value = _values(row)
    return json.dumps(value, separators=(",", ":")).encode()


def decode(line: bytes) -> Sample:
    """Decode a line written by :func:`encode`."""
    value = json.loads(line)
    if "chosen" in value:
        return Pair(chosen=_conversation(value["chosen"]), rejected=_conversation(value["rejected"]))
    if "judged" in value:
        return Judged(conversation=_conversation(value["judged"]), desirable=value["good"])
    return _picture(value) if "caption" in value else _conversation(value)


def _picture(value: dict[str, Any]) -> Picture:
    line, source = value["at"]
    width, height = value["size"]
    image = base64.b64decode(value["image"])
    return Picture(
        caption=value["caption"], image=image, width=width, height=height, line=line, source=source
    )


def _values(conversation: Conversation) -> dict[str, Any]:
    value: dict[str, Any] = {"at": [conversation.line, conversation.source]}
    if conversation.text is not None:
        value["text"] = conversation.text
        if not (conversation.begins and conversation.ends):
            value["part"] = [conversation.begins, conversation.ends]
    else:
        value["messages"] = [_turn(message) for message in conversation.messages]
        if conversation.tools:
            value["tools"] = conversation.tools
        if conversation.images:
            value["images"] = [base64.b64encode(image).decode() for image in conversation.images]
    return value


def _turn(message: Message) -> list[Any]:
    """Encode a turn as role and content, with further fields if it has any."""
    optional: dict[str, Any] = {} if message.trained else {"trained": False}
    for name in ("tool_calls", "name", "tool_call_id", "reasoning"):
        if value := getattr(message, name):
            optional[name] = value
    return [message.role, message.content, optional] if optional else [message.role, message.content]


def _conversation(value: dict[str, Any]) -> Conversation:
    line, source = value["at"]
    messages = tuple(
        Message(role=role, content=content, **(options[0] if options else {}))
        for role, content, *options in value.get("messages", ())
    )
    begins, ends = value.get("part", (True, True))
    return Conversation(
        messages=messages,
        tools=value.get("tools", ""),
        images=tuple(map(base64.b64decode, value.get("images", ()))),
        text=value.get("text"),
        begins=begins,
        ends=ends,
        line=line,
        source=source,
    )


def copied(rows: Sequence[Sample], folder: Path) -> StoredRows:
    """Write rows of any kind to a folder."""
    with Writer(folder) as writer:
        for row in rows:
            writer.add(row)
    return StoredRows(folder)
