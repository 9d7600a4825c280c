"""Plain text for continued pre-training (task pretrain), from JSONL, text files and Parquet.

* JSONL, one object per line: its ``text`` is a document; other keys are ignored
* ``.txt``: the whole file is one document
* ``.parquet``: column ``text``, one document per row

A document of more than :data:`SECTION` characters becomes several rows (sections), so that it is never in
memory completely. Only the first section gets the begin-of-sequence token, and only the last one the
end-of-sequence token.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset.columns import UnknownColumns
from launchers.dataset.preferences import Sample
from launchers.dataset.readable import check_readable, conversion_advice
from launchers.dataset.rows import NO_COLUMNS, Conversation, read_as
from launchers.dataset.stored import Selected, characters_of
from launchers.dataset.turns import Fields, text_of

COLUMN = "text"
SECTION = 1 << 20  # maximum number of characters of a document in one row
_BLOCK = 1 << 18  # bytes of a text file read at a time
_BREAK = re.compile(r"(?<=\w)\s(?=\w)")  # boundary between words, where tokenizers split too
_BREAK_WINDOW = 4096  # characters before the maximum length of a section that are searched for a break


def is_text_file(path: Path) -> bool:
    """Whether a file is plain text, by its suffix."""
    return path.suffix.lower() == ".txt"


def read(path: Path, columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[Conversation]:
    """Read and check the documents of a file; raises UserError that lists unusable rows."""
    if is_text_file(path):
        return _sections(_text_of_file(path))
    documents = read_as(path, parse, columns, [columns.get(COLUMN, COLUMN)])
    return itertools.chain.from_iterable(_sections([row.text or ""], row.line) for row in documents)


def parse(row: Any, line: int = 0) -> Conversation:
    """Parse one decoded JSONL row as a document; raises BadRow."""
    row = Fields.of(row)
    if COLUMN not in row:
        keys = ", ".join(f"`{key}`" for key in list(row)[:6]) or "nothing"
        reason = f"{keys}, but task pretrain needs plain text (`{COLUMN}`)"
        raise UnknownColumns(reason, row, [COLUMN])
    return Conversation(text=text_of(row[COLUMN], f"`{COLUMN}`"), line=line)


def from_conversations(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """Convert chats to plain text: their turns, separated by blank lines."""
    for row in conversations:
        text = "\n\n".join(message.content for message in row.messages) if row.text is None else row.text
        yield Conversation(text=text, line=row.line)


def hold_out(
    documents: Sequence[Sample], characters: int, order: Sequence[int], max_held_out: int
) -> tuple[Selected, Selected]:
    """Split documents into training documents and held-out documents of about ``characters`` characters.

    Complete documents are held out in ``order`` (indices) as far as they fit, at most ``max_held_out``. If
    their text is less than half of ``characters``, the end of the longest other document is held out too.
    """
    import numpy as np

    lengths = characters_of(documents)
    selected: list[int] = []
    characters_left = characters
    for index in order:
        if characters_left <= 0 or len(selected) == max_held_out:
            break
        if lengths[index] <= characters_left:
            selected.append(index)
            characters_left -= int(lengths[index])
    remaining = np.delete(np.arange(len(documents)), selected)
    training_start: dict[int, Sample] = {}
    held_out_end: dict[int, Sample] = {}
    if characters_left > characters / 2 and len(selected) < max_held_out:
        longest = int(remaining[np.argmax(lengths[remaining])])
        document = documents[longest]
        cut = _split_off_end(document, characters_left) if isinstance(document, Conversation) else None
        if cut is not None:
            training_start[longest], held_out_end[longest] = cut
            selected.append(longest)
    return Selected(documents, remaining, training_start), Selected(
        documents, np.array(selected, dtype=np.int64), held_out_end
    )


def _split_off_end(document: Conversation, characters: int) -> tuple[Conversation, Conversation] | None:
    """Split a document so that the second part has about ``characters`` characters, at most half of it.

    Splits at white space if there is any. Returns None if a part would be empty.
    """
    text = document.text or ""
    position = len(text) - min(characters, len(text) // 2)
    space = re.compile(r"\s").search(text, position)
    head, end = (
        (text[:position], text[position:]) if space is None else (text[: space.end()], text[space.end() :])
    )
    if not head.strip() or not end.strip():
        return None
    return replace(document, text=head), replace(document, text=end)


def piece_lengths(length: int, longest: int) -> list[int]:
    """Return the lengths of consecutive pieces of a document of ``length`` tokens, each at most ``longest``.

    A last piece of one token would have no label, because nothing predicts its first token; therefore the
    piece before it is one token shorter.
    """
    full_pieces, remainder = divmod(length, longest)
    sizes = [longest] * full_pieces + [remainder] * (remainder > 0)
    if remainder == 1 and full_pieces and longest > 2:
        sizes[-2:] = [longest - 1, 2]
    return sizes


def _sections(pieces: Iterable[str], line: int = 0) -> Iterator[Conversation]:
    """Convert a document, given in pieces of text, to rows of at most :data:`SECTION` characters."""
    buffer, is_first = "", True
    for piece in pieces:
        text, first = buffer + piece, 0
        while len(text) - first > SECTION:
            last = first + SECTION
            breaks = [match.start() for match in _BREAK.finditer(text, last - _BREAK_WINDOW, last)]
            cut = breaks[-1] if breaks else last
            yield Conversation(text=text[first:cut], begins=is_first, ends=False, line=line)
            first, is_first = cut, False
        buffer = text[first:]
    yield Conversation(text=buffer, begins=is_first, line=line)


def _text_of_file(path: Path) -> Iterator[str]:
    """Iterate over the text of a file in pieces; raises UserError if it is not UTF-8, or blank."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_read, blank, at_start = 0, True, True
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(_BLOCK)
                if not bytes_read:
                    check_readable(path, block)
                partial_bytes = len(decoder.getstate()[0])  # bytes of an incomplete character
                text = decoder.decode(block, final=not block)
                if at_start:
                    text = text.removeprefix("\ufeff")
                blank, at_start = blank and not text.strip(), False
                yield text
                if not block:
                    break
                bytes_read += len(block)
    except OSError as error:
        raise UserError(f"Dataset {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        position = bytes_read - partial_bytes + error.start + 1
        raise UserError(
            f"Dataset {path} is not UTF-8 (byte {position:,}).", conversion_advice(path)
        ) from None
    if blank:
        raise UserError(f"Dataset {path} is empty.", "Use a text file that is not blank.")
