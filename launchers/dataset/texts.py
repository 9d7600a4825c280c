"""Plain text for continued pre-training (task pretrain): documents out of JSONL, text files and Parquet.

* JSONL, one object a line: its ``text`` is a document; other keys are ignored
* ``.txt``: the whole file is one document
* ``.parquet``: column ``text``, a document a row
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset.rows import BadRow, Conversation, object_of, parse_all, read_as, text_of

COLUMN = "text"
SUFFIXES = (".txt", ".parquet")  # of files that are read for task pretrain alone
_BATCH = 1024  # rows of a Parquet file that are decoded at a time


def is_text_file(path: Path) -> bool:
    """Whether a file can hold nothing but plain text, by its name."""
    return path.suffix.lower() in SUFFIXES


def read(path: Path) -> list[Conversation]:
    """The documents of a file, every one checked; raises UserError that names what can't be used."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return [_whole_file(path)]
    if suffix == ".parquet":
        documents = parse_all(path, enumerate(_column(path), start=1), _document, unit="row")
        if not documents:
            raise UserError(f"Dataset {path} is empty.", "Give a Parquet file with a document a row.")
        return documents
    return read_as(path, parse)


def parse(row: Any, line: int = 0) -> Conversation:
    """One decoded row of JSONL as a document; raises BadRow."""
    row = object_of(row)
    if COLUMN not in row:
        keys = ", ".join(f"`{key}`" for key in list(row)[:6]) or "nothing"
        raise BadRow(f"{keys}, but task pretrain learns plain text (`{COLUMN}`)")
    return _document(row[COLUMN], line)


def from_conversations(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Plain text out of chats: the turns below each other."""
    documents = []
    for row in conversations:
        text = "\n\n".join(message.content for message in row.messages) if row.text is None else row.text
        documents.append(Conversation(text=text, line=row.line))
    return documents


def hold_out(
    documents: Sequence[Conversation], characters: int, drawn: Sequence[int], most: int
) -> tuple[list[Conversation], list[Conversation]]:
    """The documents to train on, and held-out ones of about so many characters.

    Whole documents, at most ``most``, are held out in the order ``drawn`` (indices) as far as they fit; where
    that is less than half of what is wanted, the end of the longest of the others too.
    """
    taken: list[int] = []
    left = characters
    for index in drawn:
        length = len(documents[index].text or "")
        if length <= left and len(taken) < most:
            taken.append(index)
            left -= length
    chosen = set(taken)
    train = [document for index, document in enumerate(documents) if index not in chosen]
    held_out = [documents[index] for index in taken]
    if left > characters / 2 and len(taken) < most:
        train, end = _without_end(train, left)
        held_out += end
    return train, held_out


def _without_end(
    documents: Sequence[Conversation], characters: int
) -> tuple[list[Conversation], list[Conversation]]:
    """The documents without the end of the longest, and that end: so many characters, at most half of it.

    It is cut at white space where there is some behind that place.
    """
    lengths = [len(document.text or "") for document in documents]
    chosen = lengths.index(max(lengths))
    text = documents[chosen].text or ""
    place = len(text) - min(characters, len(text) // 2)
    space = re.compile(r"\s").search(text, place)
    begin, end = (text[:place], text[place:]) if space is None else (text[: space.end()], text[space.end() :])
    if not begin.strip() or not end.strip():
        return list(documents), []
    shortened = [replace(d, text=begin) if i == chosen else d for i, d in enumerate(documents)]
    return shortened, [replace(documents[chosen], text=end)]


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


def _column(path: Path) -> Iterator[Any]:
    """The values of a Parquet file's column, decoded batch by batch."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"Dataset {path}: Parquet needs the `pyarrow` package, which is not installed.",
            "pip install pyarrow",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if COLUMN not in names:
                columns = ", ".join(f"`{name}`" for name in names[:6]) or "no columns"
                raise UserError(
                    f"Dataset {path} has {columns}, but task pretrain learns plain text (`{COLUMN}`).",
                    f"Rename the column that holds the documents to `{COLUMN}`.",
                )
            for batch in file.iter_batches(batch_size=_BATCH, columns=[COLUMN]):
                yield from batch.column(0).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"Dataset {path} can't be read as Parquet: {reason}") from None
