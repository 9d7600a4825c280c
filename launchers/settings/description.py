"""Names, types, choices, defaults and help texts of all settings, and their JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launchers.settings.fields import Settings

SCHEMA_FILE = Path(__file__).with_name("settings.schema.json")


def dotted_names() -> list[str]:
    """Return the names of all settings, as ``--set`` accepts them."""

    def walk(section: type[BaseModel], prefix: str) -> list[str]:
        names: list[str] = []
        for name, info in section.model_fields.items():
            kind = info.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += walk(kind, f"{prefix}{name}.")
            else:
                names.append(prefix + name)
        return names

    return walk(Settings, "")


def flat(settings: Settings) -> dict[str, str]:
    """Return all settings by dotted name, formatted as ``--set`` accepts them."""

    def value_of(name: str) -> str:
        value: Any = settings
        for part in name.split("."):
            value = getattr(value, part)
        return value if isinstance(value, str) else json.dumps(value, default=str)

    return {name: value_of(name) for name in dotted_names()}


def help_of(name: str) -> str:
    """Return the help text of a setting, by its dotted name, as one paragraph."""
    return " ".join((_field(name).description or "").split())


def choices_of(name: str) -> tuple[str, ...]:
    """Return the allowed values of a setting with a closed set, by its dotted name; empty for all others."""
    kind = _field(name).annotation
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def annotation_of(name: str) -> Any:
    """Return the type annotation of a setting, by its dotted name."""
    return _field(name).annotation


def type_of(name: str) -> str:
    """Describe a setting's type for help texts: its values if they are a closed set."""
    return _describe_type(annotation_of(name))


def _describe_type(kind: Any) -> str:
    """Describe a type annotation as text."""
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any"}
    origin, parts = get_origin(kind), get_args(kind)
    if kind in names:
        return names[kind]
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin is Annotated:
        return _describe_type(parts[0])
    if origin is tuple:
        return f"list of {_describe_type(parts[0])}"
    if origin is dict:
        return "mapping"
    described = dict.fromkeys(_describe_type(part) for part in parts if part is not type(None))
    return " or ".join(described)


def default_of(name: str) -> Any:
    """Default of a setting, by its dotted name."""
    return _field(name).get_default(call_default_factory=True)


def _field(name: str) -> FieldInfo:
    """Return pydantic's description of a setting, by its dotted name."""
    section: Any = Settings
    *sections, last = name.split(".")
    for part in sections:
        section = section.model_fields[part].annotation
    info: FieldInfo = section.model_fields[last]
    return info


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Settings.model_json_schema(),
    }
