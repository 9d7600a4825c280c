"""Rows of prompts, which the model itself answers: any row of rows.py, whose answer is left out, or none.

Also taken: ``{"prompt": "..."}``, ``{"prompt": [{"role": "user", "content": "..."}]}`` and the same list as
``messages``, each without an answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launchers.dataset import rows
from launchers.dataset.rows import BadRow, Conversation, Message

_ANSWERS = ("completion", "response")


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
