"""Readable JSON of records: one line per simple record, without fields that have their default value.

Reading restores the same record, because omitted fields get their defaults.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any


def text(record: Any) -> str:
    """Convert a dataclass to JSON with all top-level fields and a final newline; ValueError for NaN."""
    return "".join(_record(record, 1, with_defaults=True)) + "\n"


def _record(record: Any, depth: int, *, with_defaults: bool = False) -> list[str]:
    pairs = [
        (name, value)
        for name, default in _fields(type(record))  # type: ignore[arg-type]  # functools.cache
        if (value := getattr(record, name)) != default or with_defaults or name == "version"
    ]
    if not any(_has_records(value) for _, value in pairs):
        return [_compact(dict(pairs))]
    pad = " " * depth
    parts = ["{\n"]
    for index, (name, value) in enumerate(pairs):
        parts += [pad, json.dumps(name), ": ", *_value(value, depth)]
        parts.append(",\n" if index + 1 < len(pairs) else "\n")
    return [*parts, pad[1:], "}"]


def _value(value: Any, depth: int) -> list[str]:
    if dataclasses.is_dataclass(value):
        return _record(value, depth + 1)
    if not _has_records(value):
        return [_compact(value)]
    pad = " " * (depth + 1)
    parts = ["[\n"]
    for index, item in enumerate(value):
        parts += [pad, *_record(item, depth + 2), ",\n" if index + 1 < len(value) else "\n"]
    return [*parts, " " * depth, "]"]


def _has_records(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return True
    return isinstance(value, tuple) and bool(value) and dataclasses.is_dataclass(value[0])


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


@cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and defaults of the fields; MISSING (equal to no value) without a default."""
    fields_shown = []
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields_shown.append((field.name, default))
    return tuple(fields_shown)
