"""Notation of options in advice for settings that are passed by dotted name: ``--set a.b=value``."""

from __future__ import annotations

import json
from typing import Any

from estimator.changes import Change, Spelling
from launchers.settings import Settings


class SetOptions:
    """Notation with ``--set`` for every option, the only one that ``python -m launchers`` accepts."""

    def name(self, option: str) -> str:
        return option

    def words(self, change: Change) -> tuple[str, ...]:
        value = default_of(change.option) if change.value is None else change.value
        return ("--set", f"{change.option}={_scalar(value)}")


def default_of(name: str) -> Any:
    """Return a setting's default, by its dotted name."""
    value: Any = Settings()
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _scalar(value: object) -> str:
    """Format a value as ``--set`` parses it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


SET: Spelling = SetOptions()
