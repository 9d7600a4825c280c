"""How a model is asked in the form that it is trained in, noted beside its data.

Who hands the model over reads it here: loading a tokenizer takes seconds and hundreds of megabytes.
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
class Asking:
    """Of a model and its tokenizer; ids are of tokens."""

    chats: bool
    """Whether the rows are chats, written by a template; else plain text."""
    template: str
    """The chat template, which plain text isn't written with."""
    end_id: int | None
    """What ends an answer as it is learnt; None: nothing does, the tokenizer has no such token."""
    pad_id: int
    shown: str
    """How the template writes :data:`QUESTION`, for a reward model with :data:`ANSWER`. Empty without
    chats, and where the template refuses it."""

    @classmethod
    def of(cls, tokenizer: Any, *, task: str, chats: bool) -> Asking:
        shown, end = "", tokenizer.eos_token_id
        # A template may take chats of another kind only
        with contextlib.suppress(UserError):
            if task == "reward":
                shown = render.written([QUESTION, ANSWER], tokenizer)
            elif chats:
                shown = render.written([QUESTION], tokenizer, prompt=True)
            if chats:
                end = render.end_of_answers(tokenizer, [QUESTION, ANSWER])
        return cls(
            chats=chats,
            template=tokenizer.chat_template,
            end_id=end,
            pad_id=render.pad_id_of(tokenizer),
            shown=shown,
        )

    @classmethod
    def read(cls, data_dir: Path) -> Asking:
        """Of prepared data."""
        return cls(**json.loads((data_dir / _FILE).read_text(encoding="utf-8")))

    def write(self, data_dir: Path) -> None:
        """Beside prepared data."""
        (data_dir / _FILE).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        return json.dumps(asdict(self))
