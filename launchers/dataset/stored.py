"""Validated rows on disk, written one by one and read by index, so that they are never all in memory.

Contents of the folder::

    rows.jsonl      one row per line, in a compact encoding (:func:`encode`)
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
    """Writer of a folder of rows. info.json is written last; without it the folder is incomplete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        (folder / _INFO).unlink(missing_ok=True)
        self._file = (folder / _ROWS).open("wb", buffering=_BUFFER)
        self._digest = hashlib.sha256()
        self._offsets, self._sources, self._text_lengths = array("q", [0]), array("i"), array("q")

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
        self._text_lengths.append(_text_length(row))

    def _write_index(self) -> None:
        import numpy as np

        np.save(self._folder / "offsets.npy", np.frombuffer(self._offsets, dtype=np.int64))
        np.save(self._folder / "sources.npy", np.frombuffer(self._sources, dtype=np.int32))
        np.save(self._folder / "characters.npy", np.frombuffer(self._text_lengths, dtype=np.int64))
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
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        first, last = self.offsets[index % len(self)], self.offsets[index % len(self) + 1]
        self._file.seek(int(first))
        return decode(self._file.read(int(last - first)))


class Selected(Sequence[Sample]):
    """Selection of rows in any order; each row is read when it is accessed.

    ``indices``: selected rows, as indices into ``rows``. ``replacements``: index -> row to use instead.
    """

    def __init__(
        self,
        rows: Sequence[Sample],
        indices: NDArray[np.integer],
        replacements: Mapping[int, Sample] | None = None,
    ) -> None:
        self.replacements = dict(replacements or {})
        if isinstance(rows, Selected):
            self.replacements = {int(rows.indices[index]): row for index, row in self.replacements.items()}
            self.replacements = rows.replacements | self.replacements
            indices = rows.indices[indices]
        self.rows: Sequence[Sample] = rows.rows if isinstance(rows, Selected) else rows
        self.indices: NDArray[np.integer] = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return Selected(self.rows, self.indices[index], self.replacements)
        row = int(self.indices[index])
        return self.replacements[row] if row in self.replacements else self.rows[row]


def sources_of(rows: Sequence[Sample]) -> NDArray[np.int32]:
    """Return the index of each row's dataset in the run: [rows]."""
    import numpy as np

    if isinstance(rows, StoredRows):
        return rows.sources
    if isinstance(rows, Selected):
        sources: NDArray[np.int32] = sources_of(rows.rows)[rows.indices]
        return sources
    return np.array([row.source for row in rows], dtype=np.int32)


def characters_of(rows: Sequence[Sample]) -> NDArray[np.int64]:
    """Return the length of each row's plain text, 0 for chats: [rows]."""
    import numpy as np

    if isinstance(rows, StoredRows):
        return rows.characters
    if isinstance(rows, Selected) and not rows.replacements:
        characters: NDArray[np.int64] = characters_of(rows.rows)[rows.indices]
        return characters
    return np.array([_text_length(row) for row in rows], dtype=np.int64)


def concatenate(parts: Sequence[Selected]) -> Selected:
    """Concatenate selections of the same rows, with equal replacements if they have a row in common."""
    import numpy as np

    replacements = {index: row for part in parts for index, row in part.replacements.items()}
    return Selected(parts[0].rows, np.concatenate([part.indices for part in parts]), replacements)


def _text_length(row: Sample) -> int:
    return len(row.text) if isinstance(row, Conversation) and row.text is not None else 0


# Compact JSON of one row: lists instead of objects with fixed keys, no empty values


def encode(row: Sample) -> bytes:
    """Encode a row as one line of JSON, without the line break."""
    if isinstance(row, Pair):
        value: Any = {
            "chosen": _encode_conversation(row.chosen),
            "rejected": _encode_conversation(row.rejected),
        }
    elif isinstance(row, Judged):
        value = {"judged": _encode_conversation(row.conversation), "good": row.desirable}
    elif isinstance(row, Picture):
        image = base64.b64encode(row.image).decode()
        value = {
            "at": [row.line, row.source],
            "caption": row.caption,
            "size": [row.width, row.height],
            "image": image,
        }
    else:
        value = _encode_conversation(row)
    return json.dumps(value, separators=(",", ":")).encode()


def decode(line: bytes) -> Sample:
    """Decode a line written by :func:`encode`."""
    value = json.loads(line)
    if "chosen" in value:
        return Pair(
            chosen=_decode_conversation(value["chosen"]), rejected=_decode_conversation(value["rejected"])
        )
    if "judged" in value:
        return Judged(conversation=_decode_conversation(value["judged"]), desirable=value["good"])
    return _decode_picture(value) if "caption" in value else _decode_conversation(value)


def _decode_picture(value: dict[str, Any]) -> Picture:
    line, source = value["at"]
    width, height = value["size"]
    image = base64.b64decode(value["image"])
    return Picture(
        caption=value["caption"], image=image, width=width, height=height, line=line, source=source
    )


def _encode_conversation(conversation: Conversation) -> dict[str, Any]:
    value: dict[str, Any] = {"at": [conversation.line, conversation.source]}
    if conversation.text is not None:
        value["text"] = conversation.text
        if not (conversation.begins and conversation.ends):
            value["part"] = [conversation.begins, conversation.ends]
    else:
        value["messages"] = [_encode_turn(message) for message in conversation.messages]
        if conversation.tools:
            value["tools"] = conversation.tools
        if conversation.images:
            value["images"] = [base64.b64encode(image).decode() for image in conversation.images]
    return value


def _encode_turn(message: Message) -> list[Any]:
    """Encode a turn as [role, content], with its other fields as a third item if it has any."""
    optional: dict[str, Any] = {} if message.trained else {"trained": False}
    for name in ("tool_calls", "name", "tool_call_id", "reasoning"):
        if value := getattr(message, name):
            optional[name] = value
    return [message.role, message.content, optional] if optional else [message.role, message.content]


def _decode_conversation(value: dict[str, Any]) -> Conversation:
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
