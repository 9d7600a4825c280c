"""Rows of a dataset: which shapes are taken, and what is wrong with those that are not.

Taken, one JSON object a line, mixed as you like:

* ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}``,
  or ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}``
* ``{"instruction": "...", "input": "...", "output": "..."}`` (``input`` may be missing; also ``context`` for
  ``input`` and ``response`` for ``output``), or ``{"prompt": "...", "completion": "..."}``
* ``{"text": "..."}``

Other keys (an id, a source) are ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from estimator.errors import UserError

SHOWN_BAD_ROWS = 10

Raw = TypeVar("Raw")
Parsed = TypeVar("Parsed")
Role = Literal["system", "user", "assistant"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
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
class Message:
    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row: a chat (``messages``), or plain text (``text``); never both."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    line: int = field(default=0, compare=False)  # of the file it came from; 0: none
    source: int = field(default=0, compare=False)  # which dataset of the run, as mixture.names counts them

    @property
    def asked(self) -> tuple[Message, ...]:
        """The turns before a chat's last answer: all of them where it ends with a question."""
        ends = bool(self.messages) and self.messages[-1].role == "assistant"
        return self.messages[:-1] if ends else self.messages


class BadRow(Exception):  # noqa: N818
    """Why a row can't be used."""


def read(path: Path) -> list[Conversation]:
    """The conversations of a JSONL file: see :func:`read_as`."""
    return read_as(path, parse)


def read_as(path: Path, parse_row: Callable[[Any, int], Parsed]) -> list[Parsed]:
    """Read and check every line of a JSONL file; blank lines are skipped.

    ``parse_row`` takes a decoded row and its line, and raises BadRow. Raises UserError that lists the bad
    rows with their line numbers, or says that the file is empty.
    """
    try:
        with Path(path).open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            parsed = parse_all(path, lines, lambda line, number: parse_row(_json(line, number), number))
    except OSError as error:
        raise UserError(f"Dataset {path} can't be read: {error.strerror}.") from None
    if not parsed:
        raise UserError(f"Dataset {path} is empty.", "Give a JSONL file: one JSON object a line.")
    return parsed


def parse_all(
    path: Path, values: Iterable[tuple[int, Raw]], parse_row: Callable[[Raw, int], Parsed], unit: str = "line"
) -> list[Parsed]:
    """All values (with their numbers in the file) as rows; UserError that lists those that are bad.

    ``unit``: what the numbers count.
    """
    parsed: list[Parsed] = []
    bad: list[tuple[int, str]] = []
    for number, value in values:
        try:
            parsed.append(parse_row(value, number))
        except BadRow as reason:  # noqa: PERF203 - each row may be bad
            bad.append((number, str(reason)))
    if bad:
        raise _error(path, bad, len(bad) + len(parsed), unit)
    return parsed


def parse(row: Any, line: int = 0) -> Conversation:
    """One decoded row as a Conversation; raises BadRow."""
    row = object_of(row)
    if row.get("messages") is not None:
        return Conversation(messages=chat(row["messages"], "messages", "role", "content"), line=line)
    if row.get("conversations") is not None:
        messages = row["conversations"]
        return Conversation(messages=chat(messages, "conversations", *keys_of(messages)), line=line)
    for question, more, answers in _PAIRS:
        answer = next((key for key in answers if key in row), None)
        if question in row and answer:
            return Conversation(messages=_pair(row, question, more, answer), line=line)
    if "text" in row:
        return Conversation(text=text_of(row["text"], "`text`"), line=line)
    raise BadRow(_nearest_shape(row))


def object_of(row: Any) -> dict[str, Any]:
    """A decoded row as the object that it has to be; raises BadRow."""
    if isinstance(row, list):
        raise BadRow("a JSON list, not an object; JSONL holds one object a line")
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object but {json.dumps(row)[:40]}")
    return row


def keys_of(messages: Any) -> tuple[str, str]:
    """What a list of turns calls role and content: OpenAI's names, or ShareGPT's."""
    first = messages[0] if isinstance(messages, list) and messages else None
    return ("from", "value") if isinstance(first, dict) and "role" not in first else ("role", "content")


def _json(line: bytes, number: int) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise BadRow("JSON that is nested too deeply") from None


def chat(
    values: Any, name: str, role_key: str, content_key: str, *, ends_with: Role = "assistant"
) -> tuple[Message, ...]:
    """The turns of a list of objects, in order; raises BadRow. ``name``: what the row calls the list."""
    if not isinstance(values, list):
        raise BadRow(f"`{name}` is not a list")
    messages = []
    for position, value in enumerate(values):
        where = f"{name}[{position}]"
        if not isinstance(value, dict):
            raise BadRow(f"{where} is not an object")
        unknown = [key for key in (role_key, content_key) if key not in value]
        if unknown:
            raise BadRow(f"{where} has no `{unknown[0]}`{_meant(unknown[0], value)}")
        role = _ROLES.get(value[role_key]) if isinstance(value[role_key], str) else None
        if role is None:
            raise BadRow(f"{where} has the unknown role {value[role_key]!r}; use system, user or assistant")
        messages.append(Message(role=role, content=text_of(joined_parts(value[content_key], where), where)))
    _check_order(messages, ends_with)
    return tuple(messages)


def _check_order(messages: Sequence[Message], ends_with: Role) -> None:
    turns = [message.role for message in messages]
    if ends_with not in turns:
        lesson = ": there is nothing to learn from it" if ends_with == "assistant" else ""
        raise BadRow(f"a chat without {_article(ends_with)} turn{lesson}")
    first = 1 if turns[0] == "system" else 0
    for position, role in enumerate(turns[first:]):
        expected = ("user", "assistant")[position % 2]
        if role != expected:
            raise BadRow(f"roles out of order: turn {first + position + 1} is {role}, not {expected}")
    if turns[-1] != ends_with:
        raise BadRow(f"roles out of order: the last turn must be the {ends_with}'s")


def _article(role: Role) -> str:
    return f"an {role}" if role == "assistant" else f"a {role}"


def joined_parts(content: Any, where: str) -> Any:
    """OpenAI's list of content parts as one text; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{where} holds a part that is not text")
        texts.append(part["text"])
    return "".join(texts)


def _pair(row: dict[str, Any], question: str, more: tuple[str, ...], answer: str) -> tuple[Message, ...]:
    prompt = text_of(row[question], f"`{question}`")
    extra = next((key for key in more if row.get(key)), None)
    if extra:
        prompt += "\n\n" + text_of(row[extra], f"`{extra}`")
    else:
        # A misspelt `input` would silently leave out half of the question.
        misspelt = [
            key
            for key in row
            if key not in _KNOWN_KEYS and difflib.get_close_matches(key.lower(), more, n=1, cutoff=0.85)
        ]
        if misspelt:
            raise BadRow(f"unknown key `{misspelt[0]}`; did you mean `{more[0]}`?")
    content = text_of(row[answer], f"`{answer}`")
    return (Message(role="user", content=prompt), Message(role="assistant", content=content))


def text_of(value: Any, where: str) -> str:
    """A text that is not empty; raises BadRow. ``where``: what the row calls it."""
    if not isinstance(value, str):
        empty = value is None
        raise BadRow(f"{where} is empty" if empty else f"{where} is not text but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{where} holds half of a surrogate pair (a broken \\ud... escape)") from None
    return value


def _nearest_shape(row: dict[str, Any]) -> str:
    """What an unknown shape lacks, by the known key that it has or nearly has."""
    if not row:
        return "an empty object"
    names = ", ".join(f"`{key}`" for key in list(row)[:6])
    for question, _, answers in _PAIRS:
        if question in row:
            return f"`{question}` without `{'` or `'.join(answers)}`{_meant(answers[0], row)}"
    for answer in ("output", "response", "completion"):
        if answer in row:
            meant = _meant("instruction", row) or _meant("prompt", row)
            return f"`{answer}` without `instruction` or `prompt`{meant}"
    for key in row:
        near = difflib.get_close_matches(key.lower(), _KNOWN_KEYS, n=1, cutoff=0.7)
        if near:
            return f"unknown key `{key}`; did you mean `{near[0]}`?"
    return (
        f"keys {names}: none of `messages`, `instruction` with `output`, `prompt` with `completion`, `text`"
    )


def _meant(wanted: str, row: dict[str, Any]) -> str:
    near = difflib.get_close_matches(wanted, [key for key in row if key not in _KNOWN_KEYS], 1)
    return f"; `{near[0]}` should be `{wanted}`?" if near else ""


def _error(path: Path, bad: list[tuple[int, str]], total: int, unit: str) -> UserError:
    advice = "Mend or remove it." if len(bad) == 1 else "Mend or remove them."
    if bad[0] == (1, "a JSON list, not an object; JSONL holds one object a line") or (
        bad[0][1].startswith("not JSON") and path.suffix == ".json"
    ):
        advice = f"A JSON list becomes JSONL with: jq -c '.[]' {path.name} > {path.stem}.jsonl"
    if len(bad) == 1:
        line, reason = bad[0]
        return UserError(f"Dataset {path}, {unit} {line}: {reason}.", advice)
    shown = [f"  {unit} {line}: {reason}" for line, reason in bad[:SHOWN_BAD_ROWS]]
    if len(bad) > SHOWN_BAD_ROWS:
        shown.append(f"  and {len(bad) - SHOWN_BAD_ROWS:,} more")
    problem = f"Dataset {path}: {len(bad):,} of {total:,} rows can't be used."
    return UserError(problem, "\n".join([*shown, advice]))
