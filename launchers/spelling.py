"""How advice names options to somebody who gives settings by their dotted names: ``--set a.b=value``."""

from __future__ import annotations

import json
from typing import Any

from estimator.changes import Change, Spelling
from launchers.settings import Settings


class SetOptions:
    """Every option as ``--set``, which is all that ``python -m launchers`` has."""

    def name(self, option: str) -> str:
        return option

    def words(self, change: Change) -> tuple[str, ...]:
        value = default_of(change.option) if change.value is None else change.value
        return ("--set", f"{change.option}={_scalar(value)}")


def default_of(name: str) -> Any:
    """A setting's default, by its dotted name."""
    value: Any = Settings()
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _scalar(value: object) -> str:
    """A value as ``--set`` reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


SET: Spelling = SetOptions()
