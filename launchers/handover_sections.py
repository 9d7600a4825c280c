"""The settings' sections of what comes after training: task metrics, and what is handed over."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from launchers.sections import Auto, NonNegative, Positive, Section

# huggingface_hub 1.x, utils/_validators.py: letters, digits, `-`, `_` and `.`, which neither `--` nor `..` is
# in, and neither `-` nor `.` is at an end of; at most 96 of them in all
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII)
_LONGEST_NAME = 96


class Harness(Section):
    tasks: tuple[str, ...] = ()
    """Tasks that lm-evaluation-harness scores base and result on, in a step of their own: names of its own, a
    task's YAML file, or a folder of such files (extra `eval`). Empty: none."""
    limit: Positive | None = None
    """Rows of each task that are scored. Empty: all of them."""
    num_fewshot: NonNegative | None = None
    """Examples before each question. Empty: as the task says."""
    batch_size: Positive | Auto = 8
    """Requests that are scored at once. auto: the largest batch that fits, up to 64."""
    chat: bool = False
    """Ask through the chat template, as the harness does with `--apply_chat_template`."""
    timeout_minutes: Positive = 240
    """Minutes after which the tasks are given up."""


class Export(Section):
    adapter_only: bool = False
    """Hand over the adapter alone: no merged model is written, and none is planned for."""
    push: str | None = None
    """Repository of the Hugging Face Hub, `user/name`, that gets the finished model, and the adapter below
    `adapter/`. The token comes from the environment alone (HF_TOKEN)."""
    visibility: Literal["private", "public"] = "private"
    """Of a repository that the push makes; one that is there stays as it is."""

    @field_validator("push")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        if value is None:
            return None
        if not _HUB_NAME.fullmatch(value) or len(value) > _LONGEST_NAME or value.endswith(".git"):
            raise ValueError("a repository of the Hub, such as my-name/my-model")
        return value
