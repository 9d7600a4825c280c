"""Dataset rows of conversations and text: parsing of all supported formats, and errors for invalid rows.

Supported formats, one object per row, which may be mixed:

* OpenAI: ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}``,
  with ``tools``, ``tool_calls`` and a turn's ``weight`` (0: not trained)
* ShareGPT: ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}``, with
  ``system`` and ``tools``
* Alpaca: ``{"instruction": "...", "input": "...", "output": "..."}`` (``input`` may be missing; also
  ``context`` for ``input`` and ``response`` for ``output``), with ``system`` and ``history``
* ``{"prompt": "...", "completion": "..."}``, each a text or a list of messages
* ``{"text": "..."}``

Other keys (an id, a source) are ignored; the number of rows that have them is reported.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from estimator.errors import UserError
from estimator.names import close_matches
from estimator.terminal import print
from launchers.dataset.columns import UnknownColumns, check_present, rename_columns
from launchers.dataset.files import FORMS, BadRow, Rows, open_rows
from launchers.dataset.progress import Progress
from launchers.dataset.readable import NOT_UTF_8, conversion_advice
from launchers.dataset.turns import Fields, Message, chat, decode_json, system_of, text_of, tools_of

SHOWN_BAD_ROWS = 10
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
_SHOWN_KEYS = 12  # unused keys listed in a message

Parsed = TypeVar("Parsed")


class ImageReader(Protocol):
    """Reader of the images in a row (launchers.images.attached)."""

    def attach(
        self, messages: Sequence[Message], row: Fields, /
    ) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
        """Read the images of a row's turns; raises BadRow.

        Returns the turns, with the placeholder turns.IMAGE for each image, and the encoded images in order.
        """
        ...


# Formats of question and answer: key of the question, keys of optional context, keys of the answer
_PAIRS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("instruction", ("input", "context"), ("output", "response")),
    ("prompt", (), ("completion", "response")),
)
# Keys of the formats for which a mapping of columns is proposed, in order of preference
_PROPOSED_KEYS = (("prompt", "response"), ("messages",), ("text",))
_KNOWN_KEYS = (
    *("messages", "conversations", "text"),
    *("instruction", "input", "context", "output", "response", "prompt", "completion"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row: either a chat (``messages``), or plain text (``text``)."""

    messages: tuple[Message, ...] = ()
    tools: str = ""  # tools available in the chat, as a JSON list
    images: tuple[bytes, ...] = ()  # encoded images, in the order of turns.IMAGE in the messages
    text: str | None = None
    begins: bool = True  # for text: whether it includes the beginning of its document
    ends: bool = True  # for text: whether it includes the end of its document
    line: int = field(default=0, compare=False)  # line of the source file; 0: none
    source: int = field(default=0, compare=False)  # index of the dataset in mixture.names

    def with_source(self, source: int) -> Conversation:
        """Return a copy with ``source`` as the index of its dataset."""
        return replace(self, source=source)

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """Turns before the last answer of a chat; all turns if it ends with a question."""
        ends_with_answer = bool(self.messages) and self.messages[-1].role == "assistant"
        return self.messages[:-1] if ends_with_answer else self.messages


def read(
    path: Path, columns: Mapping[str, str] = NO_COLUMNS, images: ImageReader | None = None
) -> Iterator[Conversation]:
    """Read and check a file of conversations (:func:`read_as`). ``images``: reader of their images."""
    return read_as(path, parse if images is None else partial(parse_with_images, images=images), columns)


def read_as(
    path: Path,
    parse_row: Callable[[Fields, int], Parsed],
    columns: Mapping[str, str] = NO_COLUMNS,
    optional_columns: Sequence[str] | None = None,
) -> Iterator[Parsed]:
    """Iterate over the parsed rows of a file. Unused keys are reported on standard error after the last row.

    Parameters
    ----------
    parse_row:
        Parser of a decoded row, called with the row and its number in the file; raises BadRow.
    columns:
        Supported key -> name of the column in the file (setting ``columns``).
    optional_columns:
        The only columns to read; None: all.

    Raises
    ------
    UserError
        After the last row, if the file is empty or has bad rows, which are listed with their numbers.
    """
    yield from read_rows(open_rows(path, optional_columns), parse_row, columns)


def read_rows(
    rows: Rows,
    parse_row: Callable[[Fields, int], Parsed],
    columns: Mapping[str, str] = NO_COLUMNS,
    forms: str = FORMS,
) -> Iterator[Parsed]:
    """Parse opened rows like :func:`read_as`. ``forms``: supported formats, for messages."""
    path = rows.path
    failures = _Failures()
    unused: Counter[str] = Counter()
    column_counts: Counter[str] = Counter()
    total = 0
    progress = Progress(f"reading {path.name}")
    try:
        for number, value in rows:
            total += 1
            progress.at(total, rows.share)
            if columns and isinstance(value, dict):
                column_counts.update(value.keys())
            try:
                if isinstance(value, BadRow):
                    raise value
                fields = Fields.of(rename_columns(value, columns))
                parsed = parse_row(fields, number)
            except BadRow as reason:
                failures.add(number, reason)
            else:
                unused.update(fields.unused)
                yield parsed
    except OSError as error:
        raise UserError(f"Dataset {path} cannot be read: {error.strerror}.") from None
    if column_counts:
        check_present(columns, column_counts, str(path))
    if failures.count:
        raise failures.error(path, total, rows.unit)
    if not total:
        raise UserError(f"Dataset {path} is empty.", f"Use {forms}.")
    if unused:
        print(_describe_unused(path, unused), file=sys.stderr, flush=True)


def parse(row: Any, line: int = 0) -> Conversation:
    """Parse one decoded row as a Conversation; raises BadRow."""
    row = Fields.of(row)
    name = row.first(("messages", "conversations"))
    if name is not None:
        return Conversation(messages=chat(row[name], name, row), tools=tools_of(row), line=line)
    for question, extra_keys, answers in _PAIRS:
        answer = row.first(answers)
        if row.has(question) and answer:
            return Conversation(
                messages=_pair(row, question, extra_keys, answer), tools=tools_of(row), line=line
            )
    if row.has("text"):
        return Conversation(text=text_of(row["text"], "`text`"), line=line)
    raise _missing_keys(row)


def parse_with_images(row: Any, line: int = 0, *, images: ImageReader) -> Conversation:
    """Parse one decoded row as a Conversation with its images; raises BadRow."""
    row = Fields.of(row)
    row.parts = []
    conversation = parse(row, line)
    if not conversation.messages:
        return conversation
    messages, attached = images.attach(conversation.messages, row)
    return replace(conversation, messages=messages, images=attached)


def _pair(row: Fields, question: str, extra_keys: tuple[str, ...], answer: str) -> tuple[Message, ...]:
    """Parse a row of question and answer, under these keys, to turns."""
    prompt_value, answer_value = decode_turns(row[question]), decode_turns(row[answer])
    if isinstance(prompt_value, list) or isinstance(answer_value, list):
        turns_of = {
            role: value if isinstance(value, list) else [{"role": role, "content": value}]
            for role, value in (("user", prompt_value), ("assistant", answer_value))
        }
        return chat([*turns_of["user"], *turns_of["assistant"]], question, row)
    prompt = text_of(prompt_value, f"`{question}`")
    extra = next((key for key in extra_keys if row.get(key)), None)
    if extra:
        prompt += "\n\n" + text_of(row[extra], f"`{extra}`")
    else:
        # With a misspelled `input`, half of the question would be silently omitted
        misspelled = [
            key for key in row if key not in _KNOWN_KEYS and close_matches(key, extra_keys, cutoff=0.85)
        ]
        if misspelled:
            raise BadRow(f"unknown key `{misspelled[0]}` (is it `{extra_keys[0]}`?)")
    content = text_of(answer_value, f"`{answer}`")
    turns = (Message(role="user", content=prompt), Message(role="assistant", content=content))
    return (*system_of(row), *history_of(row), *turns)


def decode_turns(value: Any) -> Any:
    """Decode a list of turns that is stored as JSON text; return other values unchanged."""
    turns = decode_json(value)
    return turns if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns) else value


def history_of(row: Fields) -> tuple[Message, ...]:
    """Parse a row's ``history``: a list of questions with their answers."""
    history = decode_json(row.get("history") or [])
    if not isinstance(history, list):
        raise BadRow("`history` is not a list")
    turns: list[Message] = []
    for position, exchange in enumerate(history):
        location = f"history[{position}]"
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise BadRow(f"{location} is not a question and its answer")
        turns.append(Message(role="user", content=text_of(exchange[0], location)))
        turns.append(Message(role="assistant", content=text_of(exchange[1], location)))
    return tuple(turns)


def _missing_keys(row: Fields) -> BadRow:
    """Build the error for a row in no supported format: the keys that it lacks, or that are misspelled."""
    if not row:
        return BadRow("an empty object")
    if row.has("chosen") and row.has("rejected"):
        return PreferencePair("`chosen` and `rejected` are a preference pair, not an answer")
    null = next((key for key in _KNOWN_KEYS if key in row and not row.has(key)), None)
    if null is not None:
        return BadRow(f"`{null}` is empty (null)")
    names = ", ".join(f"`{key}`" for key in list(row)[:6])
    for question, _, answers in _PAIRS:
        if question in row:
            reason = f"`{question}` without `{'` or `'.join(answers)}`{_suggestion(answers[0], row)}"
            return UnknownColumns(reason, row, answers[:1])
    for answer, question in (("output", "instruction"), ("response", "prompt"), ("completion", "prompt")):
        if answer in row:
            suggestion = _suggestion("instruction", row) or _suggestion("prompt", row)
            return UnknownColumns(
                f"`{answer}` without `instruction` or `prompt`{suggestion}", row, [question]
            )
    for key in row:
        similar = close_matches(key, _KNOWN_KEYS, cutoff=0.7)
        if similar:
            return UnknownColumns(f"unknown key `{key}` (is it `{similar[0]}`?)", row, *_PROPOSED_KEYS)
    return UnknownColumns(
        f"keys {names}: none of `messages`, `instruction` with `output`, `prompt` with `completion`, `text`",
        row,
        *_PROPOSED_KEYS,
    )


def _suggestion(expected: str, row: Fields) -> str:
    """Return `` (is it `KEY`?)`` if the row has a key similar to ``expected``; empty otherwise."""
    similar = close_matches(expected, [key for key in row if key not in _KNOWN_KEYS])
    return f" (is it `{similar[0]}`?)" if similar else ""


def _describe_unused(path: Path, unused: Counter[str]) -> str:
    """List the keys that were not used, with the number of rows that have them."""
    named = [f"`{key}` ({count:,} rows)" for key, count in unused.most_common(_SHOWN_KEYS)]
    if len(unused) > _SHOWN_KEYS:
        named.append(f"and {len(unused) - _SHOWN_KEYS} more")
    return f"Dataset {path}: these keys are not used: {', '.join(named)}"


class PreferencePair(BadRow):
    """A row of preferences in a file that is read as chats."""


class _Failures:
    """Bad rows of a file: their count, and the reasons of the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[tuple[int, str]] = []
        self._common: BadRow | None = None  # reason that all bad rows so far have in common

    def add(self, number: int, reason: BadRow) -> None:
        """Record the reason why a row is unusable."""
        if not self.count:
            self._common = reason
        elif str(reason) != str(self._common):
            self._common = None
        self.count += 1
        if self.count <= SHOWN_BAD_ROWS:
            self._first.append((number, str(reason)))

    def error(self, path: Path, total: int, unit: str) -> UserError:
        """Build the error that lists the bad rows; a single line if all rows have the same reason."""
        number, reason = self._first[0]
        advice = "" if not reason.startswith(NOT_UTF_8) else conversion_advice(path)
        if isinstance(self._common, UnknownColumns):
            advice = f"Name its columns: {self._common.option}"
        elif isinstance(self._common, PreferencePair):
            advice = "Train on preferences: --task dpo (or orpo, simpo, reward)"
        if self.count == 1:
            return UserError(f"Dataset {path}, {unit} {number}: {reason}.", advice or "Fix or remove it.")
        problem = f"Dataset {path}: {self.count:,} of {total:,} rows cannot be used"
        if self._common is not None and (advice or self.count == total):
            return UserError(f"{problem}: {reason}.", advice or "Fix or remove them.")
        lines = [f"  {unit} {number}: {reason}" for number, reason in self._first]
        if self.count > len(lines):
            lines.append(f"  and {self.count - len(lines):,} more")
        return UserError(f"{problem}.", "\n".join([*lines, advice or "Fix or remove them."]))
