"""Plain text for continued pre-training (task pretrain): documents out of JSONL, text files and Parquet.

* JSONL, one object a line: its ``text`` is a document; other keys are ignored
* ``.txt``: the whole file is one document
* ``.parquet``: column ``text``, a document a row
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset.files import BadRow
from launchers.dataset.preferences import Sample
from launchers.dataset.rows import Conversation, read_as
from launchers.dataset.stored import Selected, characters_of
from launchers.dataset.turns import Fields, text_of

COLUMN = "text"


def is_text_file(path: Path) -> bool:
    """Whether a file can hold nothing but plain text, by its name."""
    return path.suffix.lower() == ".txt"


def read(path: Path) -> Iterator[Conversation]:
    """The documents of a file, every one checked; raises UserError that names what can't be used."""
    if is_text_file(path):
        return iter([_whole_file(path)])
    return read_as(path, parse, [COLUMN])


def parse(row: Any, line: int = 0) -> Conversation:
    """One decoded row of JSONL as a document; raises BadRow."""
    row = Fields.of(row)
    if COLUMN not in row:
        keys = ", ".join(f"`{key}`" for key in list(row)[:6]) or "nothing"
        raise BadRow(f"{keys}, but task pretrain learns plain text (`{COLUMN}`)")
    return _document(row[COLUMN], line)


def from_conversations(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """Plain text out of chats: the turns below each other."""
    for row in conversations:
        text = "\n\n".join(message.content for message in row.messages) if row.text is None else row.text
        yield Conversation(text=text, line=row.line)


def hold_out(
    documents: Sequence[Sample], characters: int, drawn: Sequence[int], most: int
) -> tuple[Selected, Selected]:
    """The documents to train on, and held-out ones of about so many characters.

    Whole documents, at most ``most``, are held out in the order ``drawn`` (indices) as far as they fit; where
    that is less than half of what is wanted, the end of the longest of the others too.
    """
    import numpy as np

    lengths = characters_of(documents)
    taken: list[int] = []
    left = characters
    for index in drawn:
        if left <= 0 or len(taken) == most:
            break
        if lengths[index] <= left:
            taken.append(index)
            left -= int(lengths[index])
    others = np.delete(np.arange(len(documents)), taken)
    train: dict[int, Sample] = {}
    end: dict[int, Sample] = {}
    if left > characters / 2 and len(taken) < most:
        longest = int(others[np.argmax(lengths[others])])
        document = documents[longest]
        cut = _cut(document, left) if isinstance(document, Conversation) else None
        if cut is not None:
            train[longest], end[longest] = cut
            taken.append(longest)
    return Selected(documents, others, train), Selected(documents, np.array(taken, dtype=np.int64), end)


def _cut(document: Conversation, characters: int) -> tuple[Conversation, Conversation] | None:
    """A document without its end, and that end: so many characters, at most half of it.

    It is cut at white space where there is some behind that place. None: one of both would be empty.
    """
    text = document.text or ""
    place = len(text) - min(characters, len(text) // 2)
    space = re.compile(r"\s").search(text, place)
    begin, end = (text[:place], text[place:]) if space is None else (text[: space.end()], text[space.end() :])
    if not begin.strip() or not end.strip():
        return None
    return replace(document, text=begin), replace(document, text=end)


def piece_lengths(length: int, longest: int) -> list[int]:
    """Tokens of the consecutive pieces of a document of ``length`` tokens, each at most ``longest``.

    A last piece of one token would teach nothing, for nothing predicts it: it gets another one from the piece
    before.
    """
    whole, rest = divmod(length, longest)
    sizes = [longest] * whole + [rest] * (rest > 0)
    if rest == 1 and whole and longest > 2:
        sizes[-2:] = [longest - 1, 2]
    return sizes


def _document(value: Any, number: int) -> Conversation:
    return Conversation(text=text_of(value, f"`{COLUMN}`"), line=number)


def _whole_file(path: Path) -> Conversation:
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"Dataset {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"Dataset {path} is not UTF-8 (byte {error.start + 1:,}).",
            f"Convert it: iconv -f ENCODING -t UTF-8 {path.name} > {path.stem}-utf-8.txt",
        ) from None
    if not text.strip():
        raise UserError(f"Dataset {path} is empty.", "Give a text file that holds a document.")
    return Conversation(text=text)
