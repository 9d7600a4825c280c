"""Prompt format of a model, stored with its prepared data.

The export reads it instead of loading the tokenizer, which takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset import render
from launchers.dataset.turns import Message

QUESTION = Message(role="user", content="Name a prime number.")
ANSWER = Message(role="assistant", content="Seven.")
_FILE = "asking.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """Prompt format of a model and its tokenizer; ids are token ids."""

    chats: bool
    """Whether the rows are chats, rendered by a template, instead of plain text."""
    template: str
    """Chat template; unused for plain text."""
    end_id: int | None
    """Token that ends an answer in training; None if the tokenizer has none."""
    pad_id: int
    rendered: str
    """:data:`QUESTION` as rendered by the template; for a reward model with :data:`ANSWER`. Empty for plain
    text, and if the template cannot render it."""

    @classmethod
    def of(cls, tokenizer: Any, *, task: str, chats: bool) -> PromptFormat:
        """Determine the prompt format of a tokenizer for a task."""
        rendered, end = "", tokenizer.eos_token_id
        # A template may refuse this chat, for example if it requires a system turn
        with contextlib.suppress(UserError):
            if task == "reward":
                rendered = render.render_messages([QUESTION, ANSWER], tokenizer)
            elif chats:
                rendered = render.render_messages([QUESTION], tokenizer, prompt=True)
            if chats:
                end = render.answer_end_token(tokenizer, [QUESTION, ANSWER])
        return cls(
            chats=chats,
            template=tokenizer.chat_template,
            end_id=end,
            pad_id=render.pad_id_of(tokenizer),
            rendered=rendered,
        )

    @classmethod
    def read(cls, data_dir: Path) -> PromptFormat:
        """Read the format from a folder of prepared data."""
        return cls(**json.loads((data_dir / _FILE).read_text(encoding="utf-8")))

    def write(self, data_dir: Path) -> None:
        """Write the format into a folder of prepared data."""
        (data_dir / _FILE).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        return json.dumps(asdict(self))
