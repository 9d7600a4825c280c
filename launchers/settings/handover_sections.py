"""Settings sections for the steps after training: task metrics and export."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from launchers.settings.sections import Auto, NonNegative, Positive, Section

# huggingface_hub 1.x, utils/_validators.py: letters, digits, `-`, `_` and `.`; no `--` or `..`, no `-` or `.`
# at either end; at most 96 characters
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII)
_MAX_NAME_LENGTH = 96


class Harness(Section):
    """Task metrics of base and finished model, by lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """lm-evaluation-harness tasks on which the base and the finished model are scored, in a separate step:
    task names, a task's YAML file, or a folder of such files (extra `eval`). Empty: none."""
    limit: Positive | None = None
    """Rows per task to score. Empty: all rows."""
    num_fewshot: NonNegative | None = None
    """Few-shot examples per question. Empty: the default of the task."""
    batch_size: Positive | Auto = 8
    """Batch size of the scored requests. auto: the largest that fits, up to 64."""
    chat: bool = False
    """Apply the chat template, like `--apply_chat_template` of the harness."""
    timeout_minutes: Positive = 240
    """Time limit of all tasks in minutes."""


class Export(Section):
    """Form and destination of the finished model."""

    adapter_only: bool = False
    """Export the adapter without merging it into the model."""
    push: str | None = None
    """Hugging Face Hub repository, `user/name`, to upload the finished model to, with the adapter below
    `adapter/`. The token is read from the environment only (HF_TOKEN)."""
    visibility: Literal["private", "public"] = "private"
    """Visibility of a repository that the upload creates; an existing repository is not changed."""

    @field_validator("push")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        if value is None:
            return None
        if not _HUB_NAME.fullmatch(value) or len(value) > _MAX_NAME_LENGTH or value.endswith(".git"):
            raise ValueError("a Hub repository, such as my-name/my-model")
        return value
