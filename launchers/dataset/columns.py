"""Dataset columns whose names differ from the supported keys: the setting ``columns``, and suggestions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from estimator.errors import UserError
from estimator.names import close_matches, did_you_mean
from launchers.dataset.files import BadRow

# Column names in use on the Hugging Face Hub for each supported key, most specific first
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns", "chats"),
    "prompt": ("question", "instruction", "query", "problem", "user", "human", "input", "source", "prompts"),
    "completion": ("answer", "response", "output", "solution", "assistant", "reply", "target", "answers"),
    "text": ("content", "document", "body", "passage", "article", "markdown"),
    "chosen": ("preferred", "accepted", "better", "winner", "positive", "good"),
    "rejected": ("dispreferred", "refused", "worse", "loser", "negative", "bad"),
    "label": ("desirable", "is_good", "liked", "rating", "thumbs_up"),
    "image": ("picture", "photo", "img", "image_path"),
}
_ALIASES = {"instruction": "prompt", "output": "completion", "response": "completion"}
_CUTOFF = 0.7  # minimum similarity of a misspelled name


class UnknownColumns(BadRow):
    """A row lacks required keys, whose values may be in columns of other names.

    ``missing``: alternative groups of keys that the row would need, the preferred group first.
    """

    def __init__(self, reason: str, row: Mapping[str, Any], *missing: Sequence[str]) -> None:
        super().__init__(reason)
        proposals = (_propose_mapping(row, keys) for keys in missing)
        self.mapping = next((proposal for proposal in proposals if proposal), {})
        self.example = ",".join(f"{key}=COLUMN" for key in missing[0])

    @property
    def option(self) -> str:
        """Option that maps the columns; with the placeholder COLUMN if no column can be proposed."""
        pairs = ",".join(f"{key}={name}" for key, name in self.mapping.items())
        return f"--columns {pairs or self.example}"


def rename_columns(row: Any, columns: Mapping[str, str]) -> Any:
    """Rename the mapped columns of a decoded row; other values are returned unchanged.

    ``columns``: supported key -> column name in the dataset. Columns that a row lacks are not mapped.
    """
    if not columns or not isinstance(row, dict):
        return row
    mapped = {key: name for key, name in columns.items() if name in row}
    mapped_names = {*mapped, *mapped.values()}
    unmapped = {name: value for name, value in row.items() if name not in mapped_names}
    return {**{key: row[name] for key, name in mapped.items()}, **unmapped}


def check_present(columns: Mapping[str, str], counts: Mapping[str, int], dataset: str) -> None:
    """Raise UserError for a mapped column that no row has.

    ``counts``: column name -> number of rows that have it.
    """
    for key, name in columns.items():
        if name not in counts and key not in counts:
            present = f"It has {', '.join(f'`{column}`' for column in list(counts)[:12])}."
            advice = f"{did_you_mean(name, counts)} {present}".strip()
            raise UserError(f"Dataset {dataset} has no column `{name}` (--columns).", advice)


def _propose_mapping(row: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Propose a column for each of the keys; return an empty mapping if one of them has none."""
    mapping: dict[str, str] = {}
    for key in keys:
        name = _column_for(key, [name for name in row if name not in mapping.values()], row)
        if name is None:
            return {}
        mapping[key] = name
    return mapping


def _column_for(key: str, names: Sequence[str], row: Mapping[str, Any]) -> str | None:
    """Return the column whose name is a synonym of the key or similar to it, and whose value fits."""
    meaning = _ALIASES.get(key, key)
    lower = {name.lower(): name for name in names}
    names_in_use = (key, meaning, *_SYNONYMS.get(meaning, ()))
    candidates = [lower[name] for name in names_in_use if name in lower]
    candidates += close_matches(key, names, cutoff=_CUTOFF)
    return next((name for name in candidates if _has_supported_type(meaning, row[name])), None)


def _has_supported_type(key: str, value: Any) -> bool:
    """Whether the type of a column's value is valid for the key."""
    if key == "messages":
        if isinstance(value, str) and value.lstrip()[:1] == "[":
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return False
        return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
    if key in ("label", "image"):
        return value is not None
    if key in ("chosen", "rejected") and isinstance(value, dict):
        return True
    return isinstance(value, str) or (key != "text" and isinstance(value, list))
