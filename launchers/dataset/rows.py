"""Dataset rows of conversations and text: supported forms, and errors for invalid rows.

Supported forms, one object per row, which may be mixed:

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from estimator.errors import UserError
from estimator.formatting import printable
from estimator.names import close_matches
from launchers.dataset.files import FORMS, BadRow, Rows, open_rows
from launchers.dataset.progress import Progress
from launchers.dataset.readable import NOT_UTF_8, conversion_advice
from launchers.dataset.turns import Fields, Message, chat, decoded, system_of, text_of, tools_of

SHOWN_BAD_ROWS = 10
_SHOWN_KEYS = 12  # unused keys listed in a message

Parsed = TypeVar("Parsed")
# For each form: key of the question, keys of an optional addition, keys of the answer
_PAIRS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("instruction", ("input", "context"), ("output", "response")),
    ("prompt", (), ("completion", "response")),
)
_KNOWN_KEYS = (
    *("messages", "conversations", "text"),
    *("instruction", "input", "context", "output", "response", "prompt", "completion"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row: either a chat (``messages``), or plain text (``text``)."""

    messages: tuple[Message, ...] = ()
    tools: str = ""  # tools available in the chat, as a JSON list
    text: str | None = None
    begins: bool = True  # for text: whether it contains the beginning of its document
    ends: bool = True  # for text: whether it contains the end of its document
    line: int = field(default=0, compare=False)  # line of the source file; 0: none
    source: int = field(default=0, compare=False)  # index of the dataset in mixture.names

    def of_source(self, source: int) -> Conversation:
        """Return a copy that belongs to this dataset of the run."""
        return replace(self, source=source)

    @property
    def asked(self) -> tuple[Message, ...]:
        """Turns before a chat's last answer; all turns if it ends with a question."""
        ends = bool(self.messages) and self.messages[-1].role == "assistant"
        return self.messages[:-1] if ends else self.messages


def read(path: Path) -> Iterator[Conversation]:
    """Read the conversations of a file, see :func:`read_as`."""
    return read_as(path, parse)


def read_as(
    path: Path, parse_row: Callable[[Fields, int], Parsed], columns: Sequence[str] | None = None
) -> Iterator[Parsed]:
    """Read and check a file of rows one by one.

    ``parse_row`` parses a decoded row, given its number in the file, and raises BadRow. After the last row
    raises UserError that lists the bad rows with their numbers, or if the file is empty; unused keys are
    reported on standard error. ``columns``: the only columns to read.
    """
    yield from read_rows(open_rows(path, columns), parse_row)


def read_rows(rows: Rows, parse_row: Callable[[Fields, int], Parsed], forms: str = FORMS) -> Iterator[Parsed]:
    """Read and check rows of any kind, like :func:`read_as`. ``forms``: supported forms, for messages."""
    path = rows.path
    bad: list[tuple[int, str]] = []
    unused: Counter[str] = Counter()
    total = failed = 0
    progress = Progress(f"reading {path.name}")
    try:
        for number, value in rows:
            total += 1
            progress.at(total, rows.share)
            try:
                if isinstance(value, BadRow):
                    raise value
                fields = Fields.of(value)
                parsed = parse_row(fields, number)
            except BadRow as reason:
                failed += 1
                if failed <= SHOWN_BAD_ROWS:
                    bad.append((number, str(reason)))
            else:
                unused.update(fields.unused)
                yield parsed
    except OSError as error:
        raise UserError(f"Dataset {path} can't be read: {error.strerror}.") from None
    if bad:
        raise _error(path, bad, failed, total, rows.unit)
    if not total:
        raise UserError(f"Dataset {path} is empty.", f"Use {forms}.")
    if unused:
        print(printable(_unused(path, unused)), file=sys.stderr, flush=True)


def parse(row: Any, line: int = 0) -> Conversation:
    """Parse one decoded row as a Conversation; raises BadRow."""
    row = Fields.of(row)
    name = row.first(("messages", "conversations"))
    if name is not None:
        return Conversation(messages=chat(row[name], name, row), tools=tools_of(row), line=line)
    for question, more, answers in _PAIRS:
        answer = row.first(answers)
        if row.has(question) and answer:
            return Conversation(messages=_pair(row, question, more, answer), tools=tools_of(row), line=line)
    if row.has("text"):
        return Conversation(text=text_of(row["text"], "`text`"), line=line)
    raise BadRow(_describe_mismatch(row))


def _pair(row: Fields, question: str, more: tuple[str, ...], answer: str) -> tuple[Message, ...]:
    asked, answered = decoded_turns(row[question]), decoded_turns(row[answer])
    if isinstance(asked, list) or isinstance(answered, list):
        before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        after = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
        return chat([*before, *after], question, row)
    prompt = text_of(asked, f"`{question}`")
    extra = next((key for key in more if row.get(key)), None)
    if extra:
        prompt += "\n\n" + text_of(row[extra], f"`{extra}`")
    else:
        # A misspelled `input` would silently omit half of the question
        misspelled = [key for key in row if key not in _KNOWN_KEYS and close_matches(key, more, cutoff=0.85)]
        if misspelled:
            raise BadRow(f"unknown key `{misspelled[0]}`; did you mean `{more[0]}`?")
    content = text_of(answered, f"`{answer}`")
    turns = (Message(role="user", content=prompt), Message(role="assistant", content=content))
    return (*system_of(row), *history_of(row), *turns)


def decoded_turns(value: Any) -> Any:
    """Decode a list of turns that is stored as JSON text; return other values unchanged."""
    turns = decoded(value)
    return turns if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns) else value


def history_of(row: Fields) -> tuple[Message, ...]:
    """Parse a row's ``history``: a list of questions with their answers."""
    history = decoded(row.get("history") or [])
    if not isinstance(history, list):
        raise BadRow("`history` is not a list")
    turns: list[Message] = []
    for position, exchange in enumerate(history):
        where = f"history[{position}]"
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise BadRow(f"{where} is not a question and its answer")
        turns.append(Message(role="user", content=text_of(exchange[0], where)))
        turns.append(Message(role="assistant", content=text_of(exchange[1], where)))
    return tuple(turns)


def _describe_mismatch(row: Fields) -> str:
    """Describe what an unknown row lacks, by the supported key that it has or nearly has."""
    if not row:
        return "an empty object"
    null = next((key for key in _KNOWN_KEYS if key in row and not row.has(key)), None)
    if null is not None:
        return f"`{null}` is empty (null)"
    names = ", ".join(f"`{key}`" for key in list(row)[:6])
    for question, _, answers in _PAIRS:
        if question in row:
            return f"`{question}` without `{'` or `'.join(answers)}`{_meant(answers[0], row)}"
    for answer in ("output", "response", "completion"):
        if answer in row:
            meant = _meant("instruction", row) or _meant("prompt", row)
            return f"`{answer}` without `instruction` or `prompt`{meant}"
    for key in row:
        near = close_matches(key, _KNOWN_KEYS, cutoff=0.7)
        if near:
            return f"unknown key `{key}`; did you mean `{near[0]}`?"
    return (
        f"keys {names}: none of `messages`, `instruction` with `output`, `prompt` with `completion`, `text`"
    )


def _meant(expected: str, row: Fields) -> str:
    near = close_matches(expected, [key for key in row if key not in _KNOWN_KEYS])
    return f"; `{near[0]}` should be `{expected}`?" if near else ""


def _unused(path: Path, unused: Counter[str]) -> str:
    named = [f"`{key}` ({count:,} rows)" for key, count in unused.most_common(_SHOWN_KEYS)]
    if len(unused) > _SHOWN_KEYS:
        named.append(f"and {len(unused) - _SHOWN_KEYS} more")
    return f"Dataset {path}: these keys are not used: {', '.join(named)}"


def _error(path: Path, bad: list[tuple[int, str]], failed: int, total: int, unit: str) -> UserError:
    convert = "" if not bad[0][1].startswith(NOT_UTF_8) else conversion_advice(path)
    if failed == 1:
        number, reason = bad[0]
        return UserError(f"Dataset {path}, {unit} {number}: {reason}.", convert or "Fix or remove it.")
    shown = [f"  {unit} {number}: {reason}" for number, reason in bad]
    if failed > len(bad):
        shown.append(f"  and {failed - len(bad):,} more")
    problem = f"Dataset {path}: {failed:,} of {total:,} rows can't be used."
    return UserError(problem, "\n".join([*shown, convert or "Fix or remove them."]))
