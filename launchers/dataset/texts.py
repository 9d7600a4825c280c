"""Plain text for continued pre-training (task pretrain): documents out of JSONL, text files and Parquet.

* JSONL, one object a line: its ``text`` is a document; other keys are ignored
* ``.txt``: the whole file is one document
* ``.parquet``: column ``text``, a document a row

A document of more than :data:`SECTION` characters is several rows, its sections, so that none is held in
memory whole: only the first begins with the token that begins a text, only the last ends with its end.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset.files import BadRow
from launchers.dataset.preferences import Sample
from launchers.dataset.readable import check_readable, converted
from launchers.dataset.rows import Conversation, read_as
from launchers.dataset.stored import Selected, characters_of
from launchers.dataset.turns import Fields, text_of

COLUMN = "text"
SECTION = 1 << 20  # characters of a document that are one row at the most
_BLOCK = 1 << 18  # bytes of a text file that are read at a time
_BREAK = re.compile(r"(?<=\w)\s(?=\w)")  # where tokenizers of words cut anyway
_LOOKED_AT = 4096  # characters before a section's end in which it may break


def is_text_file(path: Path) -> bool:
    """Whether a file can hold nothing but plain text, by its name."""
    return path.suffix.lower() == ".txt"


def read(path: Path) -> Iterator[Conversation]:
    """The documents of a file, every one checked; raises UserError that names what can't be used."""
    if is_text_file(path):
        return _sections(_text_of_file(path))
    documents = read_as(path, parse, [COLUMN])
    return itertools.chain.from_iterable(_sections([row.text or ""], row.line) for row in documents)


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


def _sections(pieces: Iterable[str], line: int = 0) -> Iterator[Conversation]:
    """A document that comes in pieces, as rows of at most :data:`SECTION` characters."""
    held, begins = "", True
    for piece in pieces:
        text, first = held + piece, 0
        while len(text) - first > SECTION:
            last = first + SECTION
            breaks = [found.start() for found in _BREAK.finditer(text, last - _LOOKED_AT, last)]
            cut = breaks[-1] if breaks else last
            yield Conversation(text=text[first:cut], begins=begins, ends=False, line=line)
            first, begins = cut, False
        held = text[first:]
    yield Conversation(text=held, begins=begins, line=line)


def _text_of_file(path: Path) -> Iterator[str]:
    """The text of a file, piece by piece; UserError where it is not UTF-8, or blank."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, blank, first = 0, True, True
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(_BLOCK)
                if not read:
                    check_readable(path, block)
                begun = len(decoder.getstate()[0])  # bytes of a character that goes on in this block
                text = decoder.decode(block, final=not block)
                if first:
                    text = text.removeprefix("\ufeff")
                blank, first = blank and not text.strip(), False
                yield text
                if not block:
                    break
                read += len(block)
    except OSError as error:
        raise UserError(f"Dataset {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        place = read - begun + error.start + 1
        raise UserError(f"Dataset {path} is not UTF-8 (byte {place:,}).", converted(path)) from None
    if blank:
        raise UserError(f"Dataset {path} is empty.", "Give a text file that holds a document.")
