"""Rows of a dataset: which shapes are taken, and what is wrong with those that are not.

Taken, one object a row, mixed as you like:

* OpenAI: ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}``,
  with ``tools``, ``tool_calls`` and a turn's ``weight`` (0: not learnt)
* ShareGPT: ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}``, with
  ``system`` and ``tools``
* Alpaca: ``{"instruction": "...", "input": "...", "output": "..."}`` (``input`` may be missing; also
  ``context`` for ``input`` and ``response`` for ``output``), with ``system`` and ``history``
* ``{"prompt": "...", "completion": "..."}``, each a text or a list of messages
* ``{"text": "..."}``

Other keys (an id, a source) are not used; how many rows have them is said.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from estimator.errors import UserError
from estimator.names import close_matches
from launchers.dataset.files import FORMS, BadRow, Rows, open_rows
from launchers.dataset.progress import Progress
from launchers.dataset.readable import NOT_UTF_8, converted
from launchers.dataset.turns import Fields, Message, chat, decoded, system_of, text_of, tools_of

SHOWN_BAD_ROWS = 10
_SHOWN_KEYS = 12  # that are not used

Parsed = TypeVar("Parsed")
# Shape by shape: the question's keys, the keys of what may follow it, the answer's keys.
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
    """One row: a chat (``messages``), or plain text (``text``); never both."""

    messages: tuple[Message, ...] = ()
    tools: str = ""  # that the chat may call: JSON of a list
    text: str | None = None
    begins: bool = True  # of a text: whether it is the beginning of its document,
    ends: bool = True  # and whether it is the end
    line: int = field(default=0, compare=False)  # of the file it came from; 0: none
    source: int = field(default=0, compare=False)  # which dataset of the run, as mixture.names counts them

    def of_source(self, source: int) -> Conversation:
        """The same, of that dataset of the run."""
        return replace(self, source=source)

    @property
    def asked(self) -> tuple[Message, ...]:
        """The turns before a chat's last answer: all of them where it ends with a question."""
        ends = bool(self.messages) and self.messages[-1].role == "assistant"
        return self.messages[:-1] if ends else self.messages


def read(path: Path) -> Iterator[Conversation]:
    """The conversations of a file: see :func:`read_as`."""
    return read_as(path, parse)


def read_as(
    path: Path, parse_row: Callable[[Fields, int], Parsed], columns: Sequence[str] | None = None
) -> Iterator[Parsed]:
    """Read and check a file of rows, one after the other.

    ``parse_row`` takes a decoded row and its number in the file, and raises BadRow. After the last row raises
    UserError that lists the bad ones with their numbers, or says that the file is empty; keys that no row's
    shape has are named on standard error. ``columns``: those that a row can have at all.
    """
    yield from read_rows(open_rows(path, columns), parse_row)


def read_rows(rows: Rows, parse_row: Callable[[Fields, int], Parsed], forms: str = FORMS) -> Iterator[Parsed]:
    """As :func:`read_as`, of rows of whatever kind. ``forms``: what may be given for an empty one."""
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
        raise UserError(f"Dataset {path} is empty.", f"Give {forms}.")
    if unused:
        print(_unused(path, unused), file=sys.stderr, flush=True)


def parse(row: Any, line: int = 0) -> Conversation:
    """One decoded row as a Conversation; raises BadRow."""
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
    raise BadRow(_nearest_shape(row))


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
        # A misspelt `input` would silently leave out half of the question.
        misspelt = [key for key in row if key not in _KNOWN_KEYS and close_matches(key, more, cutoff=0.85)]
        if misspelt:
            raise BadRow(f"unknown key `{misspelt[0]}`; did you mean `{more[0]}`?")
    content = text_of(answered, f"`{answer}`")
    turns = (Message(role="user", content=prompt), Message(role="assistant", content=content))
    return (*system_of(row), *history_of(row), *turns)


def decoded_turns(value: Any) -> Any:
    """A list of turns, also one that is written as JSON in a text; else the value as it is."""
    found = decoded(value)
    return found if isinstance(found, list) and all(isinstance(turn, dict) for turn in found) else value


def history_of(row: Fields) -> tuple[Message, ...]:
    """The exchanges that a row's ``history`` has: a list of questions with their answers."""
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


def _nearest_shape(row: Fields) -> str:
    """What an unknown shape lacks, by the known key that it has or nearly has."""
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


def _meant(wanted: str, row: Fields) -> str:
    near = close_matches(wanted, [key for key in row if key not in _KNOWN_KEYS])
    return f"; `{near[0]}` should be `{wanted}`?" if near else ""


def _unused(path: Path, unused: Counter[str]) -> str:
    named = [f"`{key}` ({count:,} rows)" for key, count in unused.most_common(_SHOWN_KEYS)]
    if len(unused) > _SHOWN_KEYS:
        named.append(f"and {len(unused) - _SHOWN_KEYS} more")
    return f"Dataset {path}: these keys are not used: {', '.join(named)}"


def _error(path: Path, bad: list[tuple[int, str]], failed: int, total: int, unit: str) -> UserError:
    convert = "" if not bad[0][1].startswith(NOT_UTF_8) else converted(path)
    if failed == 1:
        number, reason = bad[0]
        return UserError(f"Dataset {path}, {unit} {number}: {reason}.", convert or "Mend or remove it.")
    shown = [f"  {unit} {number}: {reason}" for number, reason in bad]
    if failed > len(bad):
        shown.append(f"  and {failed - len(bad):,} more")
    problem = f"Dataset {path}: {failed:,} of {total:,} rows can't be used."
    return UserError(problem, "\n".join([*shown, convert or "Mend or remove them."]))
