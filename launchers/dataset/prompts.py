"""Prompts for sampled answers: rows in the formats of rows.py, whose last answer is ignored if present.

Rows without an answer are also supported: ``{"prompt": "..."}``, ``{"prompt": [{"role": "user", "content":
"..."}]}`` and ``{"messages": [...]}`` with such a list.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.dataset import render, rows
from launchers.dataset.columns import UnknownColumns
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Fields, Message, chat, ends_with_question, system_of, text_of, tools_of

_ANSWERS = ("completion", "response")
_BATCH = 1024  # prompts tokenized at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt: a dataset row without its last answer."""

    index: int  # index among the prompts of the run
    text: str  # rendered for the model, with special tokens
    shown: str  # contents of the turns, without roles or special tokens; for scoring functions and people
    tokens: int  # number of tokens in ``text``
    messages: tuple[Message, ...] = ()  # turns of a chat, without the last answer
    tools: str = ""  # tools available in the chat
    prefix: str | None = None  # for plain text: the beginning, which the model continues

    def with_answer(self, answer: str) -> Conversation:
        """Return a training row of the prompt and an answer."""
        if self.prefix is not None:
            return Conversation(text=self.prefix + answer)
        turn = Message(role="assistant", content=answer)
        return Conversation(messages=(*self.messages, turn), tools=self.tools)


def read(path: Path, columns: Mapping[str, str] = rows.NO_COLUMNS) -> Iterator[Conversation]:
    """Read and check a file of prompts (:func:`launchers.dataset.rows.read_as`)."""
    return rows.read_as(path, parse, columns)


def parse(row: Any, line: int = 0) -> Conversation:
    """Parse one decoded row as a conversation, with its answer if it has one; raises BadRow."""
    row = Fields.of(row)
    if row.has("prompt") and row.first(_ANSWERS) is None:
        return Conversation(messages=_parse_prompt(row), tools=tools_of(row), line=line)
    name = row.first(("messages", "conversations"))
    if name is not None and ends_with_question(row[name]):
        messages = chat(row[name], name, row, ends_with="user")
        return Conversation(messages=messages, tools=tools_of(row), line=line)
    if not row.keys() & {"prompt", "messages", "conversations", "instruction", "text"}:
        names = ", ".join(f"`{key}`" for key in list(row)[:6]) or "none"
        reason = f"keys {names}: no `prompt`, and none of `messages`, `instruction`, `text`"
        raise UnknownColumns(reason, row, ["prompt"], ["messages"], ["text"])
    return rows.parse(row, line)


def _parse_prompt(row: Fields) -> tuple[Message, ...]:
    """Parse the turns of a row that has a `prompt` and no answer."""
    prompt = rows.decode_turns(row["prompt"])
    if isinstance(prompt, list):
        return chat(prompt, "prompt", row, ends_with="user")
    turn = Message(role="user", content=text_of(prompt, "`prompt`"))
    return (*system_of(row), *rows.history_of(row), turn)


def prompts_of(conversations: Iterable[Conversation], tokenizer: Any) -> Iterator[Prompt]:
    """Make the prompt of each row: a chat up to its last answer, or the beginning of a text."""
    return (prompt for prompt, _ in tokenized(conversations, tokenizer))


def tokenized(conversations: Iterable[Conversation], tokenizer: Any) -> Iterator[tuple[Prompt, list[int]]]:
    """Make the prompt of each row; iterate over (prompt, token ids)."""
    numbered = enumerate(conversations)
    while batch := list(itertools.islice(numbered, _BATCH)):
        texts = [render.prompt_of(conversation, tokenizer)[0] for _, conversation in batch]
        ids_of = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        for (index, conversation), text, ids in zip(batch, texts, ids_of, strict=True):
            yield _make_prompt(index, conversation, text, len(ids)), ids


def _make_prompt(index: int, conversation: Conversation, text: str, tokens: int) -> Prompt:
    """Build the prompt of a row from its rendered ``text``. ``tokens``: number of tokens in it."""
    if conversation.text is not None:
        prefix = render.text_prompt(conversation.text)
        return Prompt(index=index, text=text, shown=prefix, tokens=tokens, prefix=prefix)
    turns, tools = conversation.prompt_messages, conversation.tools
    shown = "\n\n".join(turn.content for turn in turns)
    return Prompt(index=index, text=text, shown=shown, tokens=tokens, messages=turns, tools=tools)


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(dataclasses.asdict(prompt)) + "\n")


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts written by :func:`write` or launchers.rejection.answers.write_rows."""
    with path.open(encoding="utf-8") as file:
        values = [json.loads(line) for line in file]
    return [
        Prompt(**{**row, "messages": tuple(Message(**message) for message in row["messages"])})
        for row in values
    ]
