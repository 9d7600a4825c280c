"""Rows of prompts, which the model itself answers: any row of rows.py, whose answer is left out, or none.

Also taken: ``{"prompt": "..."}``, ``{"prompt": [{"role": "user", "content": "..."}]}`` and the same list as
``messages``, each without an answer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.dataset import render, rows
from launchers.dataset.rows import BadRow, Conversation, Message

_ANSWERS = ("completion", "response")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt: what a row of the dataset has before its last answer."""

    index: int  # its place among the prompts of the run
    text: str  # as the model sees it, special tokens included
    shown: str  # as a scoring function and a person see it: the turns' contents, without roles or tokens
    tokens: int  # of the text
    messages: tuple[Message, ...] = ()  # of a chat, without the last answer
    prefix: str | None = None  # of plain text: the part that the model goes on with

    def with_answer(self, answer: str) -> Conversation:
        """The prompt with an answer, as a row to train on."""
        if self.prefix is not None:
            return Conversation(text=self.prefix + answer)
        return Conversation(messages=(*self.messages, Message(role="assistant", content=answer)))


def read(path: Path) -> list[Conversation]:
    """The prompts of a JSONL file: see :func:`launchers.dataset.rows.read_as`."""
    return rows.read_as(path, parse)


def parse(row: Any, line: int = 0) -> Conversation:
    """One decoded row as a conversation without an answer, or with the one that it has; raises BadRow."""
    row = rows.object_of(row)
    prompt = row.get("prompt")
    if prompt is not None and not any(answer in row for answer in _ANSWERS):
        if isinstance(prompt, list):
            return Conversation(messages=_asked(prompt, "prompt"), line=line)
        text = rows.text_of(prompt, "`prompt`")
        return Conversation(messages=(Message(role="user", content=text),), line=line)
    turns = row.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "user":
        return Conversation(messages=_asked(turns, "messages"), line=line)
    if prompt is None and turns is None and not row.keys() & {"conversations", "instruction", "text"}:
        names = ", ".join(f"`{key}`" for key in list(row)[:6]) or "none"
        raise BadRow(f"keys {names}: no `prompt`, and none of `messages`, `instruction`, `text`")
    return rows.parse(row, line)


def _asked(turns: list[Any], name: str) -> tuple[Message, ...]:
    return rows.chat(turns, name, *rows.keys_of(turns), ends_with="user")


def prompts_of(conversations: Sequence[Conversation], tokenizer: Any) -> list[Prompt]:
    """The prompts of the rows, in their order: a chat up to its last answer, a plain text's beginning."""
    prompts = []
    for index, conversation in enumerate(conversations):
        text, rest = render.prompt_of(conversation, tokenizer)
        tokens = len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if conversation.text is not None:
            prefix = conversation.text[: len(conversation.text) - len(rest)]
            prompts.append(Prompt(index=index, text=text, shown=prefix, tokens=tokens, prefix=prefix))
        else:
            before = conversation.asked
            shown = "\n\n".join(message.content for message in before)
            prompts.append(Prompt(index=index, text=text, shown=shown, tokens=tokens, messages=before))
    return prompts


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    """Prompts as JSON lines."""
    path.write_text("".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts))


def read_written(path: Path) -> list[Prompt]:
    """The prompts of a file that :func:`write` has made, or launchers.rejection.answers.write_rows."""
    with path.open(encoding="utf-8") as file:
        values = [json.loads(line) for line in file]
    return [
        Prompt(**{**row, "messages": tuple(Message(**message) for message in row["messages"])})
        for row in values
    ]
