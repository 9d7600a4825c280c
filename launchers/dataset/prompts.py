"""Rows of prompts, which the model itself answers: any row of rows.py, whose answer is left out, or none.

Also taken: ``{"prompt": "..."}``, ``{"prompt": [{"role": "user", "content": "..."}]}`` and the same list as
``messages``, each without an answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.dataset import render, rows
from launchers.dataset.files import BadRow
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import (
    Fields,
    Message,
    chat,
    ends_with_question,
    system_of,
    text_of,
    tools_of,
)

_ANSWERS = ("completion", "response")
_BATCH = 1024  # prompts tokenised at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt: what a row of the dataset has before its last answer."""

    index: int  # its place among the prompts of the run
    text: str  # as the model sees it, special tokens included
    shown: str  # as a scoring function and a person see it: the turns' contents, without roles or tokens
    tokens: int  # of the text
    messages: tuple[Message, ...] = ()  # of a chat, without the last answer
    tools: str = ""  # that the chat may call
    prefix: str | None = None  # of plain text: the part that the model goes on with

    def with_answer(self, answer: str) -> Conversation:
        """The prompt with an answer, as a row to train on."""
        if self.prefix is not None:
            return Conversation(text=self.prefix + answer)
        turn = Message(role="assistant", content=answer)
        return Conversation(messages=(*self.messages, turn), tools=self.tools)


def read(path: Path) -> Iterator[Conversation]:
    """The prompts of a file: see :func:`launchers.dataset.rows.read_as`."""
    return rows.read_as(path, parse)


def parse(row: Any, line: int = 0) -> Conversation:
    """One decoded row as a conversation without an answer, or with the one that it has; raises BadRow."""
    row = Fields.of(row)
    if row.has("prompt") and row.first(_ANSWERS) is None:
        return Conversation(messages=_asked(row), tools=tools_of(row), line=line)
    name = row.first(("messages", "conversations"))
    if name is not None and ends_with_question(row[name]):
        turns = chat(row[name], name, row, ends_with="user")
        return Conversation(messages=turns, tools=tools_of(row), line=line)
    if not row.keys() & {"prompt", "messages", "conversations", "instruction", "text"}:
        names = ", ".join(f"`{key}`" for key in list(row)[:6]) or "none"
        raise BadRow(f"keys {names}: no `prompt`, and none of `messages`, `instruction`, `text`")
    return rows.parse(row, line)


def _asked(row: Fields) -> tuple[Message, ...]:
    """The turns that `prompt` is, alone."""
    prompt = rows.decoded_turns(row["prompt"])
    if isinstance(prompt, list):
        return chat(prompt, "prompt", row, ends_with="user")
    turn = Message(role="user", content=text_of(prompt, "`prompt`"))
    return (*system_of(row), *rows.history_of(row), turn)


def prompts_of(conversations: Iterable[Conversation], tokenizer: Any) -> Iterator[Prompt]:
    """The prompts of the rows, in their order: a chat up to its last answer, a plain text's beginning."""
    return (prompt for prompt, _ in tokenised(conversations, tokenizer))


def tokenised(conversations: Iterable[Conversation], tokenizer: Any) -> Iterator[tuple[Prompt, list[int]]]:
    """The same, each with its tokens, which are as many as it says."""
    numbered = enumerate(conversations)
    while some := list(itertools.islice(numbered, _BATCH)):
        texts = [render.prompt_of(conversation, tokenizer)[0] for _, conversation in some]
        ids_of = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        for (index, conversation), text, ids in zip(some, texts, ids_of, strict=True):
            yield _prompt(index, conversation, text, len(ids)), ids


def _prompt(index: int, conversation: Conversation, text: str, tokens: int) -> Prompt:
    if conversation.text is not None:
        prefix = render.beginning_of(conversation.text)
        return Prompt(index=index, text=text, shown=prefix, tokens=tokens, prefix=prefix)
    asked = conversation.asked
    shown = "\n\n".join(message.content for message in asked)
    return Prompt(
        index=index, text=text, shown=shown, tokens=tokens, messages=asked, tools=conversation.tools
    )


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    """Prompts as JSON lines, one after the other."""
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(dataclasses.asdict(prompt)) + "\n")


def read_written(path: Path) -> list[Prompt]:
    """The prompts of a file that :func:`write` has made, or launchers.rejection.answers.write_rows."""
    with path.open(encoding="utf-8") as file:
        values = [json.loads(line) for line in file]
    return [
        Prompt(**{**row, "messages": tuple(Message(**message) for message in row["messages"])})
        for row in values
    ]
