"""Short conversations to tokenize, and rows on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launchers.dataset.preferences import Sample
from launchers.dataset.rows import Conversation
from launchers.dataset.stored import StoredRows, Writer
from launchers.dataset.turns import Message, Role

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(*contents: str, system: str | None = None, line: int = 0) -> Conversation:
    roles: list[Role] = ["user", "assistant"]
    messages = [Message(role=roles[i % 2], content=content) for i, content in enumerate(contents)]
    if system:
        messages.insert(0, Message(role="system", content=system))
    return Conversation(messages=tuple(messages), line=line)


def some(count: int) -> list[Conversation]:
    return [chat(f"What is {n} + {n}?", f"It is {n + n}, of course.", line=n + 1) for n in range(count)]


def stored(rows: Iterable[Sample], folder: Path) -> StoredRows:
    with Writer(folder) as writer:
        for row in rows:
            writer.add(row)
    return StoredRows(folder)
